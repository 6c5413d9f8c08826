"""A lab: several hosts on one machine, with addresses, names, folders and link speeds of their own.

Each host is a network namespace. Another namespace holds the bridge between them, so the machine's own network is
never changed.
"""
