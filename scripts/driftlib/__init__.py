"""Finds test stubs that lack an attribute which production code reads."""
