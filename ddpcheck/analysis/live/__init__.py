"""State of a running job."""
