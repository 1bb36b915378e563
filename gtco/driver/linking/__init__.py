"""From kernels to a library: places for tensors, the plan, metadata, and what is compared."""
