"""Unit tests of the package agent."""
