"""Products of numbers of eight bits."""
