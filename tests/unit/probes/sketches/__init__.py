"""Unit tests of the package probes.sketches."""
