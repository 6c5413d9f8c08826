"""Step times of the ranks: phases, stragglers and scaling."""
