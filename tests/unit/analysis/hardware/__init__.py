"""Unit tests of the package analysis.hardware."""
