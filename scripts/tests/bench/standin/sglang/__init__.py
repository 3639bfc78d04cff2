"""A stand-in for the SGLang engine: no model, the HTTP contract the harness uses.

Its server breaks on purpose: --faults takes a comma-separated list.
"""
