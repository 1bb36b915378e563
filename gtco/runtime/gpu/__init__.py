"""What libraries for GPUs have of their own: a plan, its table, tensors on a device, the driver."""
