"""From a model and an example batch to a Graph: recording, normalising, fingerprinting."""
