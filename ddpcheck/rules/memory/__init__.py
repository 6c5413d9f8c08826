"""Rules about memory (5xx)."""
