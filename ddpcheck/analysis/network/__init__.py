"""What the links between nodes gave while the job asked them, and which of them is slow."""
