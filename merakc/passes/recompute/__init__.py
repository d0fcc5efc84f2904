"""Recomputation inside the backward: blocks are made again right before they are read."""
