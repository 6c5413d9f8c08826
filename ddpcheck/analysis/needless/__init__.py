"""Synchronisation that a job may not need, and what it takes."""
