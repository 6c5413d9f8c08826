"""Unit tests of the package diff."""
