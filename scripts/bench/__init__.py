"""Paired measurements and correctness probes for an SGLang patch series."""
