"""Orders of work of a pipeline: the known ones, and ones made for given costs and memory."""
