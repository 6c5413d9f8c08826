"""Unit tests of the package analysis.network."""
