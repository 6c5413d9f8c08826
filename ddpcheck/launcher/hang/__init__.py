"""Detects ranks that wait for each other forever."""
