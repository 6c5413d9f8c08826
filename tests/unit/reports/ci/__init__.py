"""Unit tests of the package reports.ci."""
