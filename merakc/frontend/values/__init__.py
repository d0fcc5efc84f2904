"""Values of a recording: symbols, what Python reads, and results."""
