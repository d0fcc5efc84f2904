"""Training: a parallel model, its steps, and what belongs to them."""
