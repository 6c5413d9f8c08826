"""Runs the scripts of examples/faults and examples/healthy under ddpcheck and compares with their headers."""
