"""Unit tests of the package reports.html."""
