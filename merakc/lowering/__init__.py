"""From a model and a plan to graphs and Programs."""
