"""A run for TensorBoard: one of its runs for the job and one for each rank."""
