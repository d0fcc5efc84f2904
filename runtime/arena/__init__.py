"""Places for all that a step makes, found before it runs, and given while it runs."""
