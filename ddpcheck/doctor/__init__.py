"""`ddpcheck doctor`: checks a machine and its ranks for problems that affect a job."""
