"""Equivalence with one process, compile times, the demo, and the comparison with the peers."""
