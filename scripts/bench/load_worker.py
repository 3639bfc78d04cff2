"""Runs `sglang.benchmark.serving` again and again in one process.

Its imports take many seconds, so the harness keeps one such process for all runs.
Standard input carries one JSON list of arguments a line; the answer, one JSON
object a line, goes to the file descriptor named in the first argument.
"""

import json
import os
import sys


def main() -> None:
    """Answers {"ok": bool, "error": str} for each line of arguments."""
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    from sglang.benchmark import serving

    answers.write(json.dumps({"ok": True, "error": ""}) + "\n")
    for line in sys.stdin:
        sys.argv = ["sglang.benchmark.serving", *json.loads(line)]
        error = ""
        try:
            serving.cli_main()
        except SystemExit as stop:
            error = f"exit status {stop.code}" if stop.code else ""
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        answers.write(json.dumps({"ok": not error, "error": error}) + "\n")


if __name__ == "__main__":
    main()
