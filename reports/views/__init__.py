"""Views: tables and series of a finished report, built once and rendered by every report."""
