"""What a call of the model gives beside its loss, and losses that are made of it outside."""
