"""Rules about wrapping a model in DDP (1xx)."""
