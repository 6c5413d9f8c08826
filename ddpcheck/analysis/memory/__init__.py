"""Memory of ranks."""
