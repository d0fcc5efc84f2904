"""Attention over blocks of a sequence that travel from rank to rank."""
