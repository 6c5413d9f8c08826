"""A lab: several hosts on one machine, with addresses, names, folders and link speeds of their own.

Each host is a network namespace; a further one holds the bridge between them, so that the machine's own
network is never touched.
"""
