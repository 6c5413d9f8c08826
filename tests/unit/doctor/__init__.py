"""Unit tests of the package doctor."""
