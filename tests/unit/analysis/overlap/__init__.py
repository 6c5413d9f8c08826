"""Unit tests of the package analysis.overlap."""
