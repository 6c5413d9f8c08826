"""Tests of ddpcheck.probes.scan."""
