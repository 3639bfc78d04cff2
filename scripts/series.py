#!/usr/bin/env python3
"""Carry the patch series: make the patched engine, export, check and test it."""

import argparse
import os
import sys
import traceback
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit(
        "series.py needs Python 3.11 or newer; run it with python3.11 or python3.12"
    )

sys.path.insert(0, str(Path(__file__).resolve().parent))

from serieslib import verbs  # noqa: E402
from serieslib.errors import (  # noqa: E402
    FAILED,
    INTERRUPTED,
    UNEXPECTED,
    SeriesError,
)
from serieslib.project import Project  # noqa: E402

EPILOG = """\
what `check` looks at:
  patches/ holds the numbered patches alone
  the base commit, made from the pinned wheel, is the pinned one
  each patch has the sha256 that export wrote into patches.sha256
  git am applies the series
  a new export gives the same bytes
  the mirror (python/, test/) is what the series adds, in both directions
  each message survives git am and carries its Upstream-Status trailer
  after each patch the touched files compile, and their modules import

exit codes: 0 ok, 1 a check or a step failed, 2 wrong usage, 3 unexpected error,
130 interrupted
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="series.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, function in verbs.VERBS.items():
        command = commands.add_parser(
            name, help=function.__doc__.splitlines()[0], description=function.__doc__
        )
        for flags, options in verbs.OPTIONS.get(name, []):
            command.add_argument(*flags, **options)
    return top


def main(argv: list[str], root: Path | None = None) -> int:
    """Run one verb on the project in ``root`` (default: this file's); the exit code."""
    try:
        arguments = parser().parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        project = Project(root or Path(__file__).resolve().parents[1])
        return verbs.VERBS[arguments.verb](project, arguments)
    except SeriesError as error:
        sys.stdout.flush()
        print(f"series.py {arguments.verb}: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("series.py: interrupted; run the same command again", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        print(
            f"series.py {arguments.verb}: {error}\n  fix: make room, or make that path "
            "readable and writable, then run the same command again",
            file=sys.stderr,
        )
        return FAILED
    except Exception:
        traceback.print_exc()
        print("series.py: unexpected error, please report it", file=sys.stderr)
        return UNEXPECTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
