"""The plan of a model's tensors: parts of a batch."""

from __future__ import annotations

from gtco.runtime.plan import Batch, TensorSpec


def test_a_tensor_is_aligned_if_each_part_of_the_batch_is() -> None:
    """The last part ends with the batch, so it may begin anywhere."""
    batch = Batch(18, 16, {"x": 0})
    assert batch.firsts == [0, 2]
    assert not batch.aligned([TensorSpec("x", "float32", (18, 1))])
    assert batch.aligned([TensorSpec("x", "float32", (18, 16))])
