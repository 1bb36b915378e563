"""gtco behind other projects' interfaces: torch.compile's backend, ONNX Runtime's session."""
