"""Executes a Program on `torch.distributed`; knows Graphs and Programs, and no models."""
