"""Machines: what they are, and this process on one of them."""
