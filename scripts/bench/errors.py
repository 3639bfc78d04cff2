"""The errors a user can cause or fix, each with its exit code."""

OK, CHECK_FAILED, USAGE, UNEXPECTED, INTERRUPTED = 0, 1, 2, 3, 130


class BenchError(Exception):
    """Expected error: the message names the thing and ends with the fix."""

    exit_code = USAGE


class CheckFailed(BenchError):
    """The harness ran, and what it looked at is not as stated."""

    exit_code = CHECK_FAILED


class RunFailed(BenchError):
    """A server or a load run ended before it gave a result."""

    exit_code = CHECK_FAILED
