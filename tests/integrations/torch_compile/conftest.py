"""Fixtures of the tests of ``torch.compile(model, backend="gtco")``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import gtco.compiler  # noqa: E402


@pytest.fixture(autouse=True)
def fresh():
    with torch.no_grad():
        yield
    torch.compiler.reset()


@pytest.fixture
def compiles(monkeypatch):
    """Takes gtco's place where a test is about what is compiled and when. The shapes and the
    options of each compile.
    """
    seen: list[SimpleNamespace] = []

    def compile_model(module, inputs, **options):
        seen.append(SimpleNamespace(shapes=[tuple(i.shape) for i in inputs], options=options))
        return module

    monkeypatch.setattr(gtco.compiler, "compile_model", compile_model)
    return seen
