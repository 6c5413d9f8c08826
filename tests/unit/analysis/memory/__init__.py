"""Unit tests of the package analysis.memory."""
