"""Checkpoints: what a training run is, in a folder that any plan can load."""
