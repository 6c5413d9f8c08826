"""Start-up of ranks, from the process to the first step."""
