"""Samples what a node does while the job runs: processors, interfaces, GPUs. Runs in the launcher, never in ranks."""
