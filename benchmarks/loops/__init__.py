"""Training loops of people's on ranks, beside the same loops in one process."""
