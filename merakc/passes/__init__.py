"""The passes: each a pure function from one frozen value to the next, one a file."""
