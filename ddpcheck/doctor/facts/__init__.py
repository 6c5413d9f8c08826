"""Facts of one process and its machine. Uses the standard library, and torch if it is installed."""
