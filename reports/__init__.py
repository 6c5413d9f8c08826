"""Reports: each renders the views of a finished analysis and computes nothing."""
