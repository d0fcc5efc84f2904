"""Backward graphs: derivatives, recomputation, simplification."""
