"""A run under way, as far as it has come."""
