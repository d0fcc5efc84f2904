"""The `merakc` command."""
