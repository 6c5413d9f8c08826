"""Measures every link between the nodes of a job, and of ranks within a node, and reports slow ones.

The measurement runs inside ranks: standard library and torch only, and torch only where it measures.
"""
