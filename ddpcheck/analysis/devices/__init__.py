"""Devices of the modules, and what is not checked on them."""
