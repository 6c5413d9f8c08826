"""Tests of reports/monitoring."""
