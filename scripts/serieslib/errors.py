"""The one error the tool raises on purpose, and its exit codes."""

OK, FAILED, USAGE, UNEXPECTED, INTERRUPTED = 0, 1, 2, 3, 130


class SeriesError(Exception):
    """An expected failure: what went wrong, then what fixes it.

    ``code`` is the exit code: FAILED for everything but wrong usage.
    """

    def __init__(self, what: str, fix: str, code: int = FAILED) -> None:
        super().__init__(f"{what}\n  fix: {fix}")
        self.code = code
