"""Unit tests of the package probes.checkpoints."""
