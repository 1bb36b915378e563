"""Verification: compares the outputs of the compiled model with a reference, on random and on
adversarial inputs.

The reference is ONNX Runtime on the model's ONNX, or the PyTorch module itself (``reference.py``).
First the graph tells what the inputs are: masks, indices of a table, or data (``roles.py``). The
inputs are chosen to find errors, so most are not friendly (``cases.py``). An error is measured
against the magnitudes around it (``compare.py``).
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
