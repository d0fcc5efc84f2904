"""Other systems, each written the way its own documentation writes it, for measuring beside."""
