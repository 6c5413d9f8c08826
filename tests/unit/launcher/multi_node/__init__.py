"""Unit tests of the package launcher.multi_node."""
