"""The contents of samples that ranks name by the same index."""
