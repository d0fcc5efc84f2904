"""A module with a variable, which a forward of the tests reads."""

FACTOR = 1.0
