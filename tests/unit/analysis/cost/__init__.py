"""Unit tests of the package analysis.cost."""
