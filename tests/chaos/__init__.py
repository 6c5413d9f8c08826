"""A campaign of faults: real jobs under ddpcheck, each with one fault at a random moment. See `__main__`."""
