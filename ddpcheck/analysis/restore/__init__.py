"""Checkpoints: what was loaded from files, and what of it the job trained with."""
