"""`ddpcheck selftest`: kernels against the reference, weights and cost of a small job with and without ddpcheck."""
