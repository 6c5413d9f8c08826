"""Unit tests of the package analysis.devices."""
