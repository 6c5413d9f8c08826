"""How gradients accumulate: what a step starts from, and how many backwards contribute to it."""
