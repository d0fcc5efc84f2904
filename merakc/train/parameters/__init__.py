"""What a rank holds of a model's parameters: which parts, whose norms, and what may update them."""
