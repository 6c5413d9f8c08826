"""Facts of one process and the machine around it, one source a file. Standard library, and torch where there is one."""
