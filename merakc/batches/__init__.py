"""Batches: where their samples stand, and their parts."""
