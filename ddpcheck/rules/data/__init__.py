"""Rules about the data that ranks train on (3xx)."""
