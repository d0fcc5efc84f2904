"""The values that the passes hand to each other: Graph, Layout, CostTable, Plan, Program."""
