"""Tests of ddpcheck.probes.samples."""
