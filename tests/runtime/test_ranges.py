"""A library of a range of sizes and lists of other sizes: which parts a run goes through."""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

from ctypes import addressof, c_int64, c_void_p
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from gtco.runtime import variants
from gtco.runtime.artifact import Artifact
from gtco.runtime.library import OK
from gtco.runtime.module import Model, load
from gtco.runtime.plan import Cover, Step, TensorSpec, Variant
from gtco.runtime.ranges import Parts, known_sizes
from gtco.runtime.writing.linking import write_artifact
from gtco.support.errors import InputError, OptionError
from gtco.support.sizes import Range
from tests.runtime.test_models import COLUMNS, SCALE, kernels
from tests.runtime.test_variants import refs

LOW, HIGH = 1, 9
# Of each choice of height and width, the samples of its parts and their prices.
# At (2, 3) a part is as large as the range, and that of 4 has the lower price a sample.
PARTS = {(2, 3): {1: 10, 4: 25, 9: 58}, (2, 5): {1: 10}, (3, 3): {1: 10, 2: 25, 6: 30}}


def variant(batch: int, height: int, width: int) -> Variant:
    """y = relu(x * scale + mask), of x [batch, height, width, columns] and a mask without columns,
    and z, which is the same for all samples.
    """
    rows = batch * height * width
    return Variant(
        (
            TensorSpec("x", "float32", (batch, height, width, COLUMNS)),
            TensorSpec("mask", "int8", (batch, height, width)),
            TensorSpec("same", "float32", (height, COLUMNS)),
            TensorSpec("kept", "int8", (height,)),
        ),
        (
            TensorSpec("y", "float32", (batch, height, width, COLUMNS)),
            TensorSpec("z", "float32", (height, COLUMNS)),
        ),
        (
            Step("scale_rows", refs("input 0", "weight 64", "arena 0"), rows, COLUMNS * 4),
            Step("mask_relu", refs("arena 0", "input 1", "output 0"), rows),
            Step("mask_relu", refs("input 2", "input 3", "output 1"), height),
        ),
        rows * COLUMNS * 4 // 64 * 64 + 64,
        {"batch": batch, "height": height, "width": width},
    )


@pytest.fixture(scope="module")
def model(kernels: bytes, tmp_path_factory: pytest.TempPathFactory) -> Model:
    every = [(batch, *others) for others, parts in PARTS.items() for batch in parts]
    variants = tuple(variant(*sizes) for sizes in every)
    symbolic = [
        TensorSpec("x", "float32", ("batch", "height", "width", COLUMNS)),
        TensorSpec("mask", "int8", ("batch", "height", "width")),
        TensorSpec("same", "float32", ("height", COLUMNS)),
        TensorSpec("kept", "int8", ("height",)),
        TensorSpec("y", "float32", ("batch", "height", "width", COLUMNS)),
        TensorSpec("z", "float32", ("height", COLUMNS)),
    ]
    artifact = Artifact(
        "ranged",
        tuple(symbolic[:4]),
        tuple(symbolic[4:]),
        (),
        max(one.arena_bytes for one in variants),
        {"kernels.o": kernels},
        ((64, SCALE),),
        ("sse2",),
        variants=variants,
        cover=Cover(
            "batch",
            Range(LOW, HIGH),
            tuple(batch for batch, *_ in every),
            tuple(price for parts in PARTS.values() for price in parts.values()),
            {"x": 0, "mask": 0, "same": None, "kept": None, "y": 0, "z": None},
        ),
    )
    folder = tmp_path_factory.mktemp("ranged")
    return load(write_artifact(artifact, folder / "ranged.so"), 2)


def inputs(batch: int, height: int, width: int) -> list[np.ndarray]:
    rng = np.random.default_rng(batch)
    return [
        rng.standard_normal((batch, height, width, COLUMNS)).astype(np.float32),
        rng.integers(-2, 3, (batch, height, width)).astype(np.int8),
        rng.standard_normal((height, COLUMNS)).astype(np.float32),
        rng.integers(-2, 3, height).astype(np.int8),
    ]


def set_shapes(model: Model, *shapes: tuple[int, ...]) -> str:
    """What C says of these shapes; "" if it takes them."""
    arrays = [(c_int64 * len(shape))(*shape) for shape in shapes]
    pointers = (c_void_p * len(arrays))(*map(addressof, arrays))
    model._set = None
    if model._library.set_shapes(model._handle, pointers) == OK:
        return ""
    return str(model._library.last_error(model._handle).decode())


def test_every_shape_in_any_order(model: Model) -> None:
    every = [(batch, *others) for others in PARTS for batch in range(LOW, HIGH + 1)]
    for seed in range(3):
        for batch, height, width in np.random.default_rng(seed).permutation(every).tolist():
            x, mask, same, kept = given = inputs(batch, height, width)
            y, z = model(*given)
            np.testing.assert_allclose(y, np.maximum(x * SCALE + mask[..., None], 0), rtol=1e-6)
            np.testing.assert_allclose(z, np.maximum(same + kept[:, None], 0), rtol=1e-6)


def test_samples_that_nobody_asked_for_do_not_count(model: Model) -> None:
    """A run of 3 samples in a part of 4 finds in its fourth what an earlier run left there."""
    many = np.full(4 * 2 * 3 * COLUMNS + 1, np.inf, np.float32)
    x, *others = inputs(4, 2, 3)
    given = many[1:].reshape(x.shape)  # not aligned: it is copied to where parts read it
    assert np.isinf(model(given, *others)[0]).any()
    x, mask, same, kept = inputs(3, 2, 3)
    y, z = model(x, mask, same, kept)
    np.testing.assert_allclose(y, np.maximum(x * SCALE + mask[..., None], 0), rtol=1e-6)
    np.testing.assert_allclose(z, np.maximum(same + kept[:, None], 0), rtol=1e-6)


def test_each_choice_has_parts_of_its_own(model: Model) -> None:
    covered = model._variants.covered
    assert covered is not None and covered.others == [
        {"height": height, "width": width} for height, width in PARTS
    ]
    for number, (others, prices) in enumerate(PARTS.items()):
        sizes = list(prices)
        for batch in range(LOW, HIGH + 1):
            shapes = [array.shape for array in inputs(batch, *others)]
            assert set_shapes(model, *shapes) == ""
            parts = covered.choices[number].of(batch)
            run = [sizes[part - covered.choices[number].first] for part in parts]
            assert sum(run[:-1]) < batch <= sum(run)
            assert model._library.num_steps(model._handle) == 3 * len(parts)
            for place, shape in ((0, (batch, *others, COLUMNS)), (1, (others[0], COLUMNS))):
                info = model._library.sized_output(model._handle, place).contents
                assert tuple(info.dims[: info.ndim]) == shape
                assert info.nbytes == 4 * np.prod(shape)
    # 6 is 4 and two of 1, six of 1, and a part
    assert [len(covered.choices[n].of(6)) for n in range(3)] == [3, 6, 1]
    # 3 is a part of 4 with one sample too many, and 7 is two of 4 with one sample twice
    assert [covered.choices[0].of(n) for n in (3, 7)] == [[1], [1, 1]]


def test_what_it_says_of_itself(model: Model) -> None:
    assert model.dims == {"batch": Range(LOW, HIGH), "height": [2, 3], "width": [3, 5]}
    info = model._library.input(model._handle, 0).contents
    assert [info.dims[axis] for axis in range(4)] == [-1, -1, -1, COLUMNS]
    assert [info.symbols[axis] for axis in range(4)] == [b"batch", b"height", b"width", None]
    header = model.path.with_suffix(".h").read_text()
    assert "compiled for\n *   batch=1..9, height=2, width=3\n" in header
    with pytest.raises(OptionError, match=r"dims=\{'batch': 1, 'height': 2, 'width': 3\}"):
        _ = model.stages


@pytest.mark.parametrize(
    ("shape", "said", "python"),
    [
        ((10, 2, 3), "'batch' (axis 0 of input 'x') is 10, and", "'batch' (axis 0) is 10, and"),
        ((0, 3, 3), "is 0, and this model was compiled for 1 to 9", "compiled for batch of 1 to 9"),
        ((2, 4, 3), "'height' (axis 1 of input 'x') is 4, and", "'height' (axis 1) is 4, and"),
        ((2, 3, 1), "was compiled for 3,5; gtco compile --dim 'width=3,5,", "--dim width=3,5,1"),
        ((2, 3, 5), "but not for all of them at once: 'x' [2, 3, 5, 40], 'mask'", "go together"),
    ],
)
def test_shapes_that_it_refuses(
    model: Model, shape: tuple[int, int, int], said: str, python: str
) -> None:
    given = inputs(*shape)
    good = inputs(5, 2, 3)
    want = model(*good)
    assert said in set_shapes(model, *(array.shape for array in given))
    with pytest.raises(InputError) as error:
        model(*given)
    assert python in str(error.value)
    assert all(map(np.array_equal, model(*good), want))


def test_tensors_that_do_not_go_together(model: Model) -> None:
    x, mask, same, kept = inputs(4, 2, 3)
    with pytest.raises(InputError, match="'batch' is 4 in input 'x' and 3 in input 'mask'"):
        model(x, mask[:3], same, kept)
    assert "'batch' is 4 in input 'x' and 3 in input 'mask'" in set_shapes(
        model, x.shape, mask[:3].shape, same.shape, kept.shape
    )
    other = inputs(4, 3, 3)
    with pytest.raises(InputError, match=r"go together.* for height=2, width=3; height=2, width=5"):
        model(x, other[1], same, kept)
    assert "not for all of them at once" in set_shapes(
        model, x.shape, other[1].shape, same.shape, kept.shape
    )


def test_descriptions_are_kept_of_so_many_sizes(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that sees more and more sizes takes no more and more memory."""
    monkeypatch.setattr(variants, "MOST_KEPT", 2)
    monkeypatch.setattr(model._variants, "_by_shapes", {})
    for batch in range(LOW, HIGH + 1):
        assert model(*inputs(batch, 2, 3))[0].shape == (batch, 2, 3, COLUMNS)
        assert 1 <= len(model._variants._by_shapes) <= 2


def test_some_sizes_of_a_range_are_a_list() -> None:
    """A library that is opened for a few of its sizes does not say that it has the others."""
    metadata = {"ranges": {"height": {"low": 1, "high": 4, "step": 1}}}
    for sizes, said in (((1, 2, 3, 4), Range(1, 4)), ((1, 3), [1, 3])):
        assert known_sizes(metadata, [{"height": size} for size in sizes]) == {"height": said}


def test_one_of_its_shapes(model: Model) -> None:
    dims = {"batch": 7, "width": 5}  # a width of 5 has one height
    with load(model.path, 1, dims=dims) as one:
        assert one.inputs[0].shape == (7, 2, 5, COLUMNS) and one.dims == {}
        assert len(one.profile(*inputs(7, 2, 5), repeat=1)) == len(one.stages) == 21
    for wrong, said in (
        ({"batch": 10, "width": 5}, r"batch=10: .* was compiled for batch=1\.\.9; .* a range that"),
        ({"batch": 4, "width": 4}, "width=4: .* was compiled for width=3,5; .* a list that"),
        ({"batch": 4, "height": 3, "width": 5}, "not compiled for batch=4, height=3, width=5 at"),
        ({"rows": 5}, r"it has 'batch', of 1\.\.9, 'height', of 2,3, 'width', of 3,5"),
    ):
        with pytest.raises(OptionError, match=said):
            load(model.path, dims=wrong)


def test_shapes_are_kept_apart_in_two_handles(model: Model) -> None:
    with load(model.path, 1) as other:
        for batch in (3, 8, 1):
            for mine, its in (((2, 3), (3, 3)), ((3, 3), (2, 5))):
                given, wanted = inputs(batch, *mine), inputs(HIGH - batch, *its)
                assert model(*given)[0].shape == given[0].shape
                assert other(*wanted)[0].shape == wanted[0].shape
                assert model(*given)[0].shape == given[0].shape


def test_the_cheapest_parts() -> None:
    """The table of csrc/cover.c and runtime/ranges.py: no other parts that cover the samples are
    cheaper, whether they add up or the last one has more than are left.
    """
    rng = np.random.default_rng(0)
    for _ in range(60):
        others = rng.choice(np.arange(2, 20), int(rng.integers(0, 4)), replace=False)
        parts = (1, *sorted(map(int, others)))
        prices = tuple(int(p * rng.integers(50, 150)) for p in parts)
        choice = Parts({}, 0, parts, prices)
        exact = [0]
        for n in range(1, 1200):
            exact.append(
                min(exact[n - p] + c for p, c in zip(parts, prices, strict=True) if p <= n)
            )
        for n in (*range(1, 40), 333, 1000, 1199):
            found = choice.of(n)
            more = [
                exact[s] + c
                for p, c in zip(parts, prices, strict=True)
                for s in range(max(0, n - p + 1), n if p <= n else 1)
            ]
            assert sum(prices[i] for i in found) == min([exact[n], *more]), (parts, prices, n)
            *others, last = (parts[i] for i in found)
            assert sum(others) < n <= sum(others) + last
            assert last <= n or not others  # it begins with a sample of the run
            assert all(a >= b for a, b in pairwise(others))
