"""Several launchers, one per node, that work on one job."""
