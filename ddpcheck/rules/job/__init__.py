"""Rules about the job and its ranks (6xx)."""
