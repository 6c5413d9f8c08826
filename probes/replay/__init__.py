"""Computes the local gradient of another rank's micro-batch again: what is handed over, and how it is replayed."""
