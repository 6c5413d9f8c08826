"""Unit tests of the package traces."""
