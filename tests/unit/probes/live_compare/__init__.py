"""Unit tests of the package probes.live_compare."""
