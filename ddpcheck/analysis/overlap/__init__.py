"""What the profiled steps of a run show: overlap, waiting, and how other buckets would do."""
