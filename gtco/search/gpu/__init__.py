"""What policies for GPUs know: the price of launches, and stand-ins for kernels that spill."""
