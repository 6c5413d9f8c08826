"""Existing Kineto traces: overlap, waiting and stragglers, and a merged timeline of all ranks."""
