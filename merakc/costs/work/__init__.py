"""What graphs compute and keep: flops, kernels, memory."""
