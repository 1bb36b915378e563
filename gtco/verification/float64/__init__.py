"""The third party: an ONNX model evaluated in numpy, in float64 or as a narrower format rounds."""
