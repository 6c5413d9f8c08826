"""Records: the typed, versioned JSON lines that ranks and launchers write, and their readers."""
