"""The sections of the page, one per file. A section without content is left out."""
