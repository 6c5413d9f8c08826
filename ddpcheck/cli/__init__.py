"""The command line: one command a file, nothing heavy imported before it is needed."""
