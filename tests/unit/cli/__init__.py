"""Unit tests of the package cli."""
