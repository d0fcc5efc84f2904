"""What of the GPU path can be proven without a GPU."""
