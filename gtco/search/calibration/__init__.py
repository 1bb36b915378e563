"""Measures this machine once: rates of micro-kernels, memory bandwidths, the time of a barrier."""
