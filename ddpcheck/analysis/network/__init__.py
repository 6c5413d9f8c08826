"""Throughput of the links between nodes, and slow links."""
