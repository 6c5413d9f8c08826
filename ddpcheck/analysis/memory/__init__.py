"""What the ranks' memory holds, whether it grows, and what could be spared."""
