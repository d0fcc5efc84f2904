"""What a stage keeps for its backward on the host: which values, and when they move."""
