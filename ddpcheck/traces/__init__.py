"""Kineto traces that people already have: from events to overlap, waiting, stragglers and one timeline."""
