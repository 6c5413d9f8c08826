"""Unit tests of the package links."""
