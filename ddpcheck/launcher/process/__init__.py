"""Runs the user's command: start, signals, end, and processes left behind."""
