"""Sketches of gradients: a few bytes that are linear in the tensor, so that means can be checked without it."""
