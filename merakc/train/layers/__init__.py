"""Layers that share one set of parameters, and get their own in the middle of a run."""
