"""Machines as values: targets, GPUs, instruction sets, and the cores that a process may use."""
