"""Tests of ddpcheck.probes.losses."""
