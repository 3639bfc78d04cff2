"""The parts of scripts/series.py: one module for each job, standard library only."""
