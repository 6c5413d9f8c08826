"""Batches, data loaders and the distribution of samples over ranks."""
