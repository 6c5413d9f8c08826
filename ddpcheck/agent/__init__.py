"""The agent: the part of ddpcheck that lives inside a rank; standard library and torch only."""
