"""Unit tests of the package analysis.timeseries."""
