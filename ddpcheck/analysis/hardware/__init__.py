"""Hardware of the nodes: their samples, related to the steps of the ranks."""
