"""Programs of stages for NVIDIA GPUs, as CUDA C++ over the headers of ``device/``."""
