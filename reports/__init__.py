"""Reports: each renders a finished analysis and computes nothing."""
