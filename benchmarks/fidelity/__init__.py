"""The cost model against published step times."""
