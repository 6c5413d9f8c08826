"""Jobs that hang: where each rank waits, and the likely mistake."""
