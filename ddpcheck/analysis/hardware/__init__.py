"""What the machines did: samples of the nodes, joined to the steps of the ranks."""
