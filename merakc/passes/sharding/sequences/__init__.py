"""Sequences over ranks: with tp, where it leaves values whole, and over cp."""
