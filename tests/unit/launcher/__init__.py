"""Unit tests of the package launcher."""
