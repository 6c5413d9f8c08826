"""A real browser for tests: Chromium without a window, spoken to over a pipe."""
