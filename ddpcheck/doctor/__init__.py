"""`ddpcheck doctor`: facts of a machine and its ranks, and what in them would get in a job's way."""
