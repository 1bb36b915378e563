"""``gtco.compile_model`` for a GPU, with a GPU here and without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gtco
from gtco.support.errors import ArtifactError
from tests.cuda.fake_driver import FakeDriver


def test_a_model_for_gpus_that_cannot_be_opened_here(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes before the compile. It has the reason and the way that needs no GPU, and
    nothing is left.
    """
    driver.reset(0, 8, 0, 1)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    begun = []
    with pytest.raises(ArtifactError, match=r"no GPU 0: .*compile_to_file") as raised:
        gtco.compile_model(
            model, x, target="cuda:sm_80", progress=lambda phase, *_: begun.append(phase)
        )
    assert not begun and "'cuda:sm_80'" in str(raised.value)
    assert not list(tmp_path.glob("gtco*"))
