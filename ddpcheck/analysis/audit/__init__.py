"""The audit: votes of several ranks on the local gradient of one, and the device that computes other values."""
