"""Ranks that are killed, stopped, fail or go their own way: how the others learn of it."""
