"""Programs of ranks: orders of actions, collectives, state."""
