"""Op modules to start from."""
