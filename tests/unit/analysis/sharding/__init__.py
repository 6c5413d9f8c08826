"""Unit tests of the package analysis.sharding."""
