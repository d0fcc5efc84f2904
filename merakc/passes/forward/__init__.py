"""Rewrites of a recorded forward."""
