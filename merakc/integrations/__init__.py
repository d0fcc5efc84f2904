"""Training programs of others, run on models of `auto_parallel`."""
