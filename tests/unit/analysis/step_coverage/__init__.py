"""Unit tests of the package analysis.step_coverage."""
