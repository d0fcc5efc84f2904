"""What a Graph costs: flops, bytes, saved activations and seconds on a Cluster."""
