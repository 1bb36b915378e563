"""The judge between two results: an ONNX model evaluated in numpy, in float64 or with the roundings
of a narrower format.
"""
