"""What parts of a batch make of every value of a forward, and the step that adds up to the whole."""
