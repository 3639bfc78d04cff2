"""`python scripts/bench VERB`: dispatches to one module per verb."""

import importlib
import sys
from pathlib import Path

# This folder must not stay on the path: its `trace` would shadow the standard
# library's for everything imported later.
HERE = Path(__file__).resolve().parent
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != HERE]
sys.path.insert(0, str(HERE.parent))

from bench import errors  # noqa: E402

VERBS = {
    "serve-ab": ("serve_ab", "paired serving runs of several engine trees"),
    "outputs": ("outputs", "fixed greedy outputs, compared between arms"),
    "continuation": ("continuation", "cold against cached continuation scores"),
    "branching": ("branching", "does a competing branch corrupt a cached prefix"),
    "trace": ("trace", "kernel counts and times from profiler traces"),
    "report": ("report", "Markdown and plots from the raw rows"),
    "tactics": ("tactics", "find, record and verify kernel tactics"),
}

USAGE = (
    "usage: python scripts/bench VERB [options]\n\n"
    "Measures an SGLang tree against another one, on real servers.\n\nverbs:\n"
    + "".join(f"  {verb:<13} {text}\n" for verb, (_, text) in VERBS.items())
    + "\n`python scripts/bench VERB --help` explains one verb. A first run on a"
    "\nmachine without a GPU:\n"
    "  python scripts/bench serve-ab scripts/bench/examples/cpu-smoke.toml\n"
    "\nexit codes: 0 ok, 1 a check failed, 2 usage, 3 unexpected, 130 interrupted\n"
)


def main(argv: list[str]) -> int:
    """Runs one verb and returns the process's exit code."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return errors.OK if argv else errors.USAGE
    verb = argv[0]
    if verb not in VERBS:
        print(
            f"bench: no verb {verb!r}; use one of: {', '.join(VERBS)}",
            file=sys.stderr,
        )
        return errors.USAGE
    try:
        module = importlib.import_module(f"bench.{VERBS[verb][0]}")
        return module.main(argv[1:])
    except errors.BenchError as error:
        print(f"bench {verb}: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        print(
            f"bench {verb}: no module {error.name!r} in {sys.executable}; run with the"
            " Python that has sglang 0.5.23 installed (docs/benchmarking.md says which),"
            " or install it there",
            file=sys.stderr,
        )
        return errors.USAGE
    except KeyboardInterrupt:
        print(
            f"bench {verb}: interrupted; finished runs are kept, the same command"
            " goes on from there",
            file=sys.stderr,
        )
        return errors.INTERRUPTED
    except SystemExit:
        raise
    except Exception:
        import traceback

        traceback.print_exc()
        print(f"bench {verb}: unexpected error, see above", file=sys.stderr)
        return errors.UNEXPECTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
