"""Checks: functions from the facts of all ranks to diagnoses. They read no files, no clock and no torch."""
