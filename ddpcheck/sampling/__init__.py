"""Samples processors, network interfaces and GPUs of a node while the job runs. Runs in the launcher only."""
