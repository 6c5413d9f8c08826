"""Tests of ddpcheck, and the corpus of broken and sound jobs."""
