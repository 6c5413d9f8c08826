"""Collectors of subjects that need no further analysis: what rules and reports need of the records, one per file."""
