"""Where the replicas of a module diverge, and what explains it."""
