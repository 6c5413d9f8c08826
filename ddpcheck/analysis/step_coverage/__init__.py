"""How many of the trained parameters were compared after each step, and why the others were not."""
