"""Unit tests of the package launcher.live."""
