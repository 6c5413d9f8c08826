"""What ranks train or use outside of DDP: comparisons, and whether a difference is a fault."""
