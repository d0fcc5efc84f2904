"""Data for the ranks of a parallel model: dealt to them, or given to each whole."""
