"""Unit tests of the package rules.performance."""
