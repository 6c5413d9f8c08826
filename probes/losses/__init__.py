"""How a loss is computed, as the end of its graph shows it, and from which labels."""
