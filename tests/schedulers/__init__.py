"""Slurm, OpenMPI and Ray with ddpcheck: `make schedulers` installs them and runs the cases."""
