"""Loops over what was hit: experts that have rows, which a mask that depends on the data says."""
