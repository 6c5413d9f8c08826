"""Metrics of a run for monitoring systems: the same values for Prometheus, OTLP, Weights & Biases and MLflow."""
