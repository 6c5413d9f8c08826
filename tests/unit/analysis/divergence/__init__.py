"""Unit tests of the package analysis.divergence."""
