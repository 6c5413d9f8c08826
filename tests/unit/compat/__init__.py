"""Unit tests of the package corpus."""
