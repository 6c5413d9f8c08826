"""Unit tests of the package sampling."""
