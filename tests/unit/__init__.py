"""Unit tests of each package, in folders of the same names."""
