"""Random valid graphs, compiled and compared with ONNX Runtime (the idea of NNSmith, Liu et al.,
ASPLOS 2023): ``python -m tests.random --help``.
"""
