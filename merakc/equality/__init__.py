"""Whether a plan trains as one process does, measured on local processes."""
