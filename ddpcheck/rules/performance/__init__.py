"""Rules about time and network (4xx)."""
