"""What a process saved to and loaded from checkpoints: contents of files, and where they were loaded into."""
