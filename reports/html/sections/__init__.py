"""The sections of the page, by subject. A section without content is left out."""
