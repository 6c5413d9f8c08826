"""Unit tests of the package analysis.accumulation."""
