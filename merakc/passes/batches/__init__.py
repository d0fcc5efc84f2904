"""What parts of a batch make of every value of a forward, and its step."""
