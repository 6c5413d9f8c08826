"""Unit tests of the package probes.digest."""
