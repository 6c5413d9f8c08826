"""Unit tests of the package rules.divergence."""
