"""Python's own state that a forward can see."""
