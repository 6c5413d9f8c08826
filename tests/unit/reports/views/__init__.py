"""Unit tests of the package reports.views."""
