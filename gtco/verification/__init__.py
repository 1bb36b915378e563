"""Is the compiled model right? Its outputs against a reference, on random and on adversarial
inputs.

The reference is ONNX Runtime on the model's ONNX, or the PyTorch module itself
(``reference.py``). What the graph says of the inputs, which are masks and which index a table, is
read first (``roles.py``); the inputs that find errors are not the friendly ones (``cases.py``); an
error counts against the magnitudes around it (``compare.py``).
"""

from gtco.verification.cases import cases
from gtco.verification.compare import compare
from gtco.verification.report import Difference, VerificationReport
from gtco.verification.roles import Role, onnx_roles
from gtco.verification.verify import TOLERANCE, verify

__all__ = [
    "TOLERANCE",
    "Difference",
    "Role",
    "VerificationReport",
    "cases",
    "compare",
    "onnx_roles",
    "verify",
]
