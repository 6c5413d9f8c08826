"""Reads a list of tensors once each: digest, sketch and count of non-finite values from one pass over memory."""
