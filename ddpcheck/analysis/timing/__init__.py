"""Where the time of a step goes: from each rank's clocks to shares, stragglers and scaling."""
