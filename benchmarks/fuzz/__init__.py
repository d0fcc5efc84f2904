"""Damaged and hostile files of every kind that merakc reads."""
