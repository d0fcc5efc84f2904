"""Recomputation inside the backward: blocks of a stage are made again right before they are read."""
