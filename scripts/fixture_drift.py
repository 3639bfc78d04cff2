"""Finds stubs in registered tests that lack what production code reads.

    python scripts/fixture_drift.py CHECKOUT [TEST ...]

CHECKOUT holds python/ (the package) and test/registered/ (the tests). A finding
is a SimpleNamespace which a registered test hands to a function of the package,
and an attribute that the function, or what it hands the object to within the
package, reads on every path the test can take. Reads that are guarded, or whose
condition cannot be told from the source, are not reported: it is meant to have
no false alarm, not to find every drift.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from driftlib.suite import BadTest, Suite  # noqa: E402

OK, FOUND, USAGE, UNEXPECTED, INTERRUPTED = 0, 1, 2, 3, 130
EPILOG = """\
exit codes: 0 nothing found, 1 a stub lacks an attribute, 2 usage or a file that
cannot be read, 3 unexpected, 130 interrupted

How to fix a finding: give the stub the attribute with the value that the test's
case has in production.
"""


class UsageError(Exception):
    """What was asked cannot be done; the text says what to do instead."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python scripts/fixture_drift.py",
        description=__doc__.split("\n\n", 2)[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument(
        "checkout", type=Path, metavar="CHECKOUT", help="folder with python/ and test/"
    )
    result.add_argument(
        "tests",
        nargs="*",
        type=Path,
        metavar="TEST",
        help="test files or folders (default: CHECKOUT/test/registered)",
    )
    return result


def test_files(checkout: Path, wanted: list[Path]) -> list[Path]:
    """Test files named or below the folders named, sorted, each once."""
    found = set()
    for path in wanted or [checkout / "test" / "registered"]:
        # As typed, or as a reader of the checkout would write it.
        place = path if path.exists() else checkout / path
        if place.is_dir():
            found |= set(place.rglob("test_*.py"))
        elif place.is_file() and place.suffix == ".py":
            found.add(place)
        else:
            raise UsageError(
                f"no test {path}; name a .py file or a folder of {checkout}"
            )
    return sorted(found)


def check(arguments: argparse.Namespace) -> int:
    """Follows the tests, prints findings and a summary, returns the exit code."""
    checkout = arguments.checkout.resolve()
    package = checkout / "python"
    if not package.is_dir():
        raise UsageError(
            f"{arguments.checkout} has no python/ folder; give the root of a checkout"
        )
    wanted = [path.resolve() if path.exists() else path for path in arguments.tests]
    suite = Suite(checkout, [package])
    broken = []
    for path in test_files(checkout, wanted):
        try:
            suite.follow(path)
        except BadTest as error:
            broken.append(str(error))
    for finding in sorted(
        suite.findings, key=lambda f: (f.test, f.stub_line, f.attribute)
    ):
        print(finding)
    for text in broken:
        print(f"fixture_drift: cannot read {text}; fix the file", file=sys.stderr)
    print(
        f"{len(suite.findings)} findings in {suite.tests} tests"
        f" of {suite.files} registered files that use SimpleNamespace"
    )
    if broken:
        return USAGE
    return FOUND if suite.findings else OK


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    arguments = parser().parse_args(argv)
    try:
        return check(arguments)
    except UsageError as error:
        print(f"fixture_drift: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:
        import traceback

        traceback.print_exc()
        print("fixture_drift: unexpected error, see above", file=sys.stderr)
        return UNEXPECTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
