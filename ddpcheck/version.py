"""The version of ddpcheck, in a file that can be read without importing anything else."""

VERSION = "0.1.0"
