"""The version of ddpcheck. This module imports nothing."""

VERSION = "0.1.0"
