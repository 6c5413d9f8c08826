"""Runs corpus and promise tests with another version of torch, or of Python, and writes docs/compatibility.md."""
