"""The live view in the last rows of the terminal."""
