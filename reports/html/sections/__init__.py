"""The sections of the page, one a file; each is left out where it has nothing to show."""
