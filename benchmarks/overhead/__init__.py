"""A step of merakc beside eager PyTorch and `torch.compile`."""
