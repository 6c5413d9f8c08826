"""A simulated accelerator: the device type "sim" with two devices or more, to run ddpcheck's device code without a GPU.

Memory is host memory, and kernels are those of the CPU. Streams, events, allocators, graphs and the process group
behave as on CUDA: see CONTRIBUTING.md for what this proves and what it does not.
"""
