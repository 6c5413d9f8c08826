"""Tests that run real commands, jobs, browsers and networks."""
