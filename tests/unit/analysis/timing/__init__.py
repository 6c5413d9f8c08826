"""Unit tests of the package analysis.timing."""
