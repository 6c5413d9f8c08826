"""Live comparison of digests: within a node through shared memory, between nodes through the job's store."""
