"""Unit tests of the package reports.terminal."""
