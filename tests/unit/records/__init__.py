"""Unit tests of the package records."""
