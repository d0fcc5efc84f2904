"""What a step should cost on these ranks, what it costs, and the book that is kept of both."""
