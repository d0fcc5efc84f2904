"""Tensor parallelism: rules, propagation, and graphs of one rank."""
