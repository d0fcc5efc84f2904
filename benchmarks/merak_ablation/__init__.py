"""Merak's ablation, simulated."""
