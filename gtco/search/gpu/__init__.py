"""The policies for GPUs: the price of launches, and stand-ins for kernels that spill."""
