"""One check a file: the facts of all ranks in, diagnoses out. No file access, no clock, no torch."""
