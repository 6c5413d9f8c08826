"""Unit tests of the package analysis.data."""
