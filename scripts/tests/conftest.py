"""Fixtures of the series tool's tests; tests import the rest from tiny_release."""

from tiny_release import (  # noqa: F401
    empty,
    finished,
    no_index,
    release,
    user,
    world,
)
