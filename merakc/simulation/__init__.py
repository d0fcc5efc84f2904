"""Simulation of Programs: times, contention and memory."""
