"""Profiled steps: overlap of communication and compute, waiting, and advice on bucket sizes."""
