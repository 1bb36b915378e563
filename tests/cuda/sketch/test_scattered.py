"""What scattered accesses cost, and what is picked in their place."""

from __future__ import annotations

from gtco.machine.gpu import GPUS
from gtco.search.gpu.policy import GpuPolicy
from gtco.tensor.analysis.scope import Scope
from gtco.tensor.sketch.depthwise import cuda as depthwise
from gtco.tensor.sketch.elementwise import cuda as elementwise
from gtco.tensor.sketch.gemm import cuda as gemm
from gtco.tensor.sketch.pool import cuda as pool
from gtco.tensor.sketch.shared.cuda_lanes import DIVISION, REMAINDER, along, operations, touched
from gtco.tensor.space import configs
from gtco.tensor.stage import Operator, Stage, TensorType, make_attrs, make_stage
from tests.cuda.sketches import check, matched

POLICY = GpuPolicy(GPUS["cuda:h200"])
TO_NHWC, TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)


def permute(source: str, made: str, image: TensorType, axes: tuple[int, ...]) -> Operator:
    shape = tuple(image.sizes[a] for a in axes)
    turned = TensorType(shape, image.dtype)
    return Operator("permute", (source,), made, turned, make_attrs(axes=axes))


def convolution(
    images: int, channels: int, side: int, filters: int, groups: int, before: bool, after: bool
) -> Stage:
    """A 3x3 convolution of float16 in NHWC, between NCHW tensors."""
    nhwc = TensorType((images, side, side, channels), "float16")
    nchw = TensorType((images, channels, side, side), "float16")
    made = TensorType((images, side, side, filters), "float16")
    attrs = make_attrs(
        strides=(1, 1), padding=(1, 1, 1, 1), dilation=(1, 1), groups=groups, layout="NHWC"
    )
    operators = [permute("x", "p", nchw, TO_NHWC)] if before else []
    source = "p" if before else "x"
    operators.append(Operator("conv2d", (source, "w"), "c", made, attrs))
    if after:
        operators.append(permute("c", "y", made, TO_NCHW))
    weight = TensorType((filters, channels // groups, 3, 3), "float16")
    return make_stage(operators, {"x": nchw if before else nhwc, "w": weight}, ["w"])


def turned(images: int, channels: int, side: int) -> Stage:
    image = TensorType((images, channels, side, side), "float16")
    return make_stage([permute("x", "y", image, TO_NHWC)], {"x": image}, [])


def test_lanes_that_read_neighbours_touch_few_sectors_and_lines() -> None:
    near, far = along([(32, 2)], 2), along([(32, 6272)], 2)
    assert (near.sectors, near.lines) == (2, 1) and (far.sectors, far.lines) == (32, 32)
    assert far.bytes(64) == 16 * near.bytes(64) and far.clocks(64) == 64
    whole = along([(32, 16)], 16)
    assert (whole.sectors, whole.lines) == (16, 4)
    rows = along([(8, 2), (4, 6272)], 2)  # four rows of eight
    assert (rows.sectors, rows.lines) == (4, 4)
    assert along([(32, None)], 2) == far
    assert touched([0, 2], 2).sectors == 16  # of two lanes that stand for 32


def test_divisions_count_as_what_they_become() -> None:
    scope = Scope()
    (k,) = scope.variables((1000,))
    assert operations([k // 9]) == DIVISION and operations([k // 8, k % 16]) == 2
    assert operations([k % 9 + k // 9 * 7, k // 9]) == DIVISION + REMAINDER + 2  # k // 9 once
    (m,) = scope.variables((1000,))
    assert operations([m // 9 + k], k) == 1


def test_a_transposition_costs_more_read_as_it_is_written() -> None:
    """Without squares in shared memory, each lane of a warp reads another sector."""
    sketch = elementwise.match(turned(32, 512, 28), POLICY.target)
    assert sketch is not None
    in_squares, alone = (
        min(POLICY.price(sketch, c) for c in configs(sketch) if bool(c["tile"]) is squares)
        for squares in (True, False)
    )
    assert alone > 2 * in_squares


def test_pixels_are_padded_a_whole_one_at_a_time() -> None:
    """A thread makes the 16 bytes of a pixel from as many reads. Each is one of a warp along a row
    of the image.
    """
    image = TensorType((2, 3, 5, 7), "float16")
    pixels = TensorType((2, 5, 7, 8), "float16")
    attrs = make_attrs(before=(0, 0, 0, 0), after=(0, 0, 0, 5), value=0)
    operators = [permute("x", "p", image, TO_NHWC), Operator("pad", ("p",), "y", pixels, attrs)]
    stage = make_stage(operators, {"x": image}, [])
    sketch = matched(elementwise.match, stage)
    assert 8 in sketch.neighbours and sketch.moved(8).in_order
    check(elementwise.match, stage, 9, 1e-3)


def test_a_copy_asks_for_too_little_an_element_at_a_time() -> None:
    """2048 threads with an element each have too few bytes under way for the memory's rate."""
    x = TensorType((512, 512, 512), "float16")
    stage = make_stage([Operator("relu", ("x",), "y", x)], {"x": x}, [])
    sketch = elementwise.match(stage, POLICY.target)
    assert sketch is not None
    by_neighbours = {c["neighbours"]: POLICY.price(sketch, c) for c in configs(sketch)}
    assert by_neighbours[1] > by_neighbours[max(by_neighbours)]


def test_an_image_is_transposed_ahead_of_its_convolution() -> None:
    """A product that gathers its windows from NCHW costs more than a transposition and the product
    that copies them from NHWC. Its result may be stored in NCHW by the product itself.
    """
    fused = POLICY.predict(convolution(32, 64, 56, 64, 1, before=True, after=True))
    apart = POLICY.predict(turned(32, 64, 56))
    apart += POLICY.predict(convolution(32, 64, 56, 64, 1, before=False, after=True))
    assert fused > 2 * apart


def test_gathered_windows_are_no_asynchronous_copies() -> None:
    sketch = gemm.match(convolution(2, 64, 14, 64, 1, before=True, after=False), POLICY.target)
    assert sketch is not None
    launch = sketch.workload(next(iter(configs(sketch))))
    assert not launch.overlapped and launch.lines > 0 and launch.indexing > 10 * launch.lines


def test_windows_run_along_what_lies_side_by_side() -> None:
    """Between NCHW tensors a depthwise convolution's lanes run along rows of the image. That costs
    about as much as to transpose the image twice, and much less than lanes along channels.
    """
    stage = convolution(32, 256, 56, 256, 256, before=True, after=True)
    sketch = matched(depthwise.match, stage)
    assert not sketch.windows.by_channels
    apart = convolution(32, 256, 56, 256, 256, before=False, after=False)
    near = POLICY.predict(stage)
    twice = 2 * POLICY.predict(turned(32, 256, 56)) + POLICY.predict(apart)
    vars(sketch.windows)["by_channels"] = True
    far = min(POLICY.price(sketch, config) for config in configs(sketch))
    assert far > 4 * max(near, twice)
    inside = matched(depthwise.match, apart)
    assert inside.windows.by_channels and inside.windows.vectors == (4, 2, 1)


def test_depthwise_along_rows_of_the_image() -> None:
    check(depthwise.match, convolution(2, 6, 9, 6, 6, before=True, after=True), 3, 1e-3)


def test_pools_along_rows_of_the_image() -> None:
    image = TensorType((2, 5, 9, 11))
    kept = TensorType((2, 5, 6, 5))  # NHWC, as the windows have it
    attrs = make_attrs(
        kernel=(3, 3), strides=(2, 2), padding=(1, 1, 1, 1), dilation=(1, 1), layout="NHWC"
    )
    operators = [
        permute("x", "p", image, TO_NHWC),
        Operator("max_pool2d", ("p",), "q", kept, attrs),
        permute("q", "y", kept, TO_NCHW),
    ]
    stage = make_stage(operators, {"x": image}, [])
    assert not matched(pool.match, stage).windows.by_channels
    check(pool.match, stage, 3)
