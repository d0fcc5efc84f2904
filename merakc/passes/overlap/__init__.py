"""Communication under computation."""
