"""Models to plan for, and their batches: presets, configurations, functions of the user's."""
