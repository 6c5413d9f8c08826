"""Probes: what observes a rank from inside, one probe a file; standard library and torch only."""
