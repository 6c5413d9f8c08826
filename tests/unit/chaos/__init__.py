"""Unit tests of the fault campaign."""
