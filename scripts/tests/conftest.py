"""Fixtures of the series tool's tests; tests import the rest from tiny_release."""

import signal

from tiny_release import (  # noqa: F401
    empty,
    finished,
    no_index,
    release,
    user,
    world,
)

# A suite started with & from a script ignores SIGINT, and so would all it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Tests with real servers first: else one worker waits minutes for the last one."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
