"""Unit tests of the package analysis.startup."""
