"""Experts in a graph, and their ranks."""
