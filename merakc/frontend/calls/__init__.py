"""How calls of torch's are written in a graph, or refused."""
