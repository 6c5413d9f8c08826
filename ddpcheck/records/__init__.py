"""Records: what ranks write down, as typed, versioned JSON lines, and how they are read back."""
