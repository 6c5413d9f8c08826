"""The agent: the code of ddpcheck that runs inside a rank. Standard library and torch only."""
