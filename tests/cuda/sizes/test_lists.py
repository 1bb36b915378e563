from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.cuda.fake_driver import FakeDriver
from tests.cuda.whole import outputs, several
from tests.end_to_end.sizes.test_variants import TOKENS, WIDTH, batched


def test_lists(driver: FakeDriver, tmp_path: Path) -> None:
    model = batched()
    report, loaded, workers = several(
        driver, tmp_path, model.SerializeToString(), None, "sm_80", dims={"batch": [1, 4, 3]}
    )
    print(report.notes, loaded, loaded.launches)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    rng = np.random.default_rng(0)
    for batch in (4, 1, 3, 3, 4, 1):
        x = rng.standard_normal((batch, TOKENS, WIDTH)).astype(np.float32)
        found = outputs(loaded, workers, {"x": x})
        for name, want in zip([o.name for o in session.get_outputs()], session.run(None, {"x": x})):
            np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-5)
    loaded.close()
    driver.check()
