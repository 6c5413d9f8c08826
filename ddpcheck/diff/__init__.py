"""Compares two runs: the first step, stage and parameter at which they diverge."""
