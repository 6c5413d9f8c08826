"""Unit tests of the package analysis.collectors."""
