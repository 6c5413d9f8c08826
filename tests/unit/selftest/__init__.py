"""Unit tests of the package selftest."""
