"""Unit tests of the package docs."""
