"""The planner: requests, candidates, search."""
