"""Configs, packings and stages as data that goes to JSON and back, and the order of a space."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtco.codegen.build import build as build_job
from gtco.codegen.jobs import Failure, Job
from gtco.machine.target import target
from gtco.tensor.packing import Packing, packed_types
from gtco.tensor.sketch import space_of
from gtco.tensor.sketch.gemm import cpu as gemm
from gtco.tensor.space import (
    Config,
    Decision,
    Option,
    Program,
    Rejection,
    Space,
    build,
    check,
    configs,
)
from gtco.tensor.stage import (
    Operator,
    Stage,
    StageInput,
    TensorType,
    make_attrs,
    make_stage,
)

names = st.text("abcxyz_", min_size=1, max_size=5)


@given(names, st.dictionaries(names.filter(lambda n: n != "sketch"), st.integers() | names))
def test_config_to_json_and_back(sketch: str, choices: dict[str, int | str]) -> None:
    config = Config(sketch, tuple(choices.items()))
    assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert all(config[name] == value for name, value in choices.items())
    assert hash(config) == hash(pickle.loads(pickle.dumps(config)))


attributes = st.recursive(
    st.integers() | st.floats(allow_nan=False) | st.booleans() | names,
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(names, attributes, max_size=3), st.lists(st.integers(1, 9) | names))
def test_stage_to_json_and_back(attrs: dict[str, Any], shape: list[int | str]) -> None:
    kind = TensorType(tuple(shape), "int64")
    stage = Stage(
        (StageInput("x", kind), StageInput("w", TensorType((3,)), True)),
        (Operator("add", ("x", "w"), "y", kind, make_attrs(**attrs), "node 7"),),
    )
    again = Stage.from_json(json.loads(json.dumps(stage.to_json())))
    assert again == stage and again.key == stage.key and hash(again) == hash(stage)


def test_a_stages_key_is_of_the_program_alone() -> None:
    def stage(name: str, size: int = 4, constant: bool = True, **attrs: Any) -> Stage:
        kind = TensorType((2, size))
        op = Operator(
            "add", (f"{name}x", f"{name}w"), f"{name}y", kind, make_attrs(**attrs), name=f"{name}!"
        )
        return make_stage([op], {f"{name}x": kind, f"{name}w": kind}, [f"{name}w"] * constant)

    assert stage("a").key == stage("b").key and stage("a") != stage("b")
    others = {stage("a", 5).key, stage("a", constant=False).key, stage("a", axis=1).key}
    assert len(others | {stage("a").key}) == 4
    assert stage("a").canonical.key == stage("a").key == f"{int(stage('a').key, 16):016x}"


@st.composite
def packings(draw: st.DrawFn) -> Packing:
    """Any view and any transposition, padding, each axis cut in two, and one more transposition."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    axes = draw(st.permutations(range(len(shape))))
    cut = [draw(st.integers(1, 4)) for _ in shape]
    pad = [-shape[a] % c + c * draw(st.integers(0, 1)) for a, c in zip(axes, cut, strict=True)]
    split: list[int] = []
    for a, p, c in zip(axes, pad, cut, strict=True):
        split += [(shape[a] + p) // c, c]
    order = draw(st.permutations(range(len(split))))
    return Packing(tuple(shape), tuple(axes), tuple(pad), tuple(split), tuple(order))


def unpacked(packing: Packing, packed: np.ndarray) -> np.ndarray:
    """The inverse of :meth:`Packing.apply`."""
    padded = packed.transpose(np.argsort(packing.order))
    sizes = [packing.shape[a] + p for a, p in zip(packing.axes, packing.pad, strict=True)]
    padded = padded.reshape(sizes)
    kept = padded[tuple(slice(0, packing.shape[a]) for a in packing.axes)]
    return kept.transpose(np.argsort(packing.axes))


@given(packings())
def test_packing_loses_nothing(packing: Packing) -> None:
    array = np.arange(1, prod(packing.shape) + 1, dtype=np.float32)
    packed = packing.apply(array)
    assert packed.shape == packing.packed_shape and packed.flags.c_contiguous
    np.testing.assert_array_equal(unpacked(packing, packed).reshape(-1), array)
    assert (packed != 0).sum() == array.size  # the padding is zeros


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 70),
    st.sampled_from(["x86-64-v3", "x86-64-v4"]),
)
def test_panels_of_a_weight(m: int, k: int, n: int, name: str) -> None:
    """The GEMM sketch asks for a packing of the whole weight, in whole vectors."""
    machine = target(name)
    types = {"x": TensorType((m, k)), "w": TensorType((k, n))}
    stage = make_stage([Operator("matmul", ("x", "w"), "y", TensorType((m, n)))], types, ["w"])
    sketch = gemm.match(stage, machine)
    assert sketch is not None
    program = build(sketch, next(iter(configs(sketch))), "f")
    assert isinstance(program, Program)
    packing = program.packings["w"]
    weight = np.arange(1, k * n + 1, dtype=np.float32).reshape(k, n)
    packed = packing.apply(weight)
    np.testing.assert_array_equal(unpacked(packing, packed).reshape(k, n), weight)
    assert packed.shape[-1] % machine.lanes == 0
    assert packed_types(stage, program.packings)["w"].shape == packed.shape
    assert packed_types(stage, program.packings)["x"] == types["x"]


@dataclass(frozen=True)
class Triangle:
    """Two decisions; the options of the second one depend on the first."""

    name = "triangle"

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        if "a" not in chosen:
            return Decision("a", "block", (1, 2, 3))
        if "b" not in chosen:
            return Decision("b", "block", tuple(range(int(chosen["a"]))))
        return None


def test_configs_in_the_order_of_the_decisions() -> None:
    found = [(c["a"], c["b"]) for c in configs(Triangle())]  # type: ignore[arg-type]
    assert found == [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]
    rest = [c["b"] for c in configs(Triangle(), {"a": 3})]  # type: ignore[arg-type]
    assert rest == [0, 1, 2]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 4) | st.booleans()), max_size=3))
def test_check_knows_exactly_the_configs_of_the_space(choices: list[tuple[str, Option]]) -> None:
    config = Config("triangle", tuple(choices))
    inside = any(c.choices == config.choices for c in configs(Triangle()))  # type: ignore[arg-type]
    inside &= not any(isinstance(choice, bool) for _, choice in choices)
    assert (check(Triangle(), config) is None) == inside  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sketch", "choices", "reason"),
    [
        ("square", {"a": 1, "b": 0}, "config of 'square'"),
        ("triangle", {}, "'a' is left open"),
        ("triangle", {"a": 2}, "'b' is left open"),
        ("triangle", {"b": 0, "a": 2}, "'b' is given where 'a' is to be decided"),
        ("triangle", {"a": 2, "b": 2}, "b=2 is none of the options 0, 1"),
        ("triangle", {"a": 2, "b": 1, "c": 0}, "nothing is left to decide"),
    ],
)
def test_a_rejection_says_why(sketch: str, choices: dict[str, Option], reason: str) -> None:
    found = check(Triangle(), Config(sketch, tuple(choices.items())))  # type: ignore[arg-type]
    assert isinstance(found, Rejection) and reason in found.detail


# the space of a stage --------------------------------------------------------------------------
@dataclass(frozen=True)
class Ladder:
    """Like the triangle, with one more decision, which has only one option."""

    name = "ladder"

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        if "c" not in chosen and "b" in chosen:
            return Decision("c", "overlap", ("next",))
        return None if "c" in chosen else Triangle().next_decision(chosen)


def toy() -> Space:
    kind = TensorType((4,))
    stage = make_stage([Operator("relu", ("x",), "y", kind)], {"x": kind}, [])
    return Space(stage, target("x86-64-v3"), (Triangle(), Ladder()))  # type: ignore[arg-type]


def test_the_sketch_is_the_first_decision() -> None:
    space = toy()
    first = space.next_decision({})
    assert first == Decision("sketch", "structure", ("triangle", "ladder"))
    assert space.next_decision({"sketch": "ladder", "a": 2, "b": 0}) == Decision(
        "c", "overlap", ("next",)
    )
    assert space.next_decision({"sketch": "triangle", "a": 2, "b": 0}) is None
    every = list(space.configs())
    assert len(every) == len(set(every)) == space.size == 12
    assert all(space.check(config) is None for config in every)
    assert all(Config.from_json(json.loads(json.dumps(c.to_json()))) == c for c in every)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"sketch": "square", "a": 1, "b": 0}, "unknown sketch"),
        ({"a": 1, "b": 0}, "unknown sketch"),
        ({"sketch": ["triangle"], "a": 1, "b": 0}, "unknown sketch"),
        ({"sketch": "triangle", "a": 1}, "left open"),
        ({"sketch": "triangle", "a": "1", "b": 0}, "no option"),
        ({"sketch": "triangle", "a": True, "b": 0}, "no option"),
        ({"sketch": "triangle", "a": [1], "b": 0}, "no option"),
        ({"sketch": "triangle", "b": 0, "a": 1}, "unknown decision"),
        ({"sketch": "triangle", "a": 1, "b": 0, "c": "next"}, "unknown decision"),
    ],
)
def test_what_a_record_may_say(written: dict[str, Any], reason: str) -> None:
    space = toy()
    config = Config.from_json(json.loads(json.dumps(written)))
    rejected = space.check(config)
    assert isinstance(rejected, Rejection) and rejected.reason == reason
    assert space.build(config, "k") == rejected
    with pytest.raises(ValueError, match=reason):
        space.mutate(config, Random(0))


@dataclass(frozen=True)
class Late:
    """A sketch whose second decision was added when there were already records of the others."""

    name = "late"

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        if "a" not in chosen:
            return Decision("a", "block", (1, 2))
        if "b" not in chosen:
            return Decision("b", "parallel", (0, 3)[2 - int(chosen["a"]) :], unsaid=0)
        if "c" not in chosen:
            return Decision("c", "grain", (8, 1))
        return None


@pytest.mark.parametrize(
    ("written", "spelled_out"),
    [
        ({"sketch": "late", "a": 2, "c": 1}, {"sketch": "late", "a": 2, "b": 0, "c": 1}),
        ({"sketch": "late", "a": 2, "b": 3, "c": 1}, {"sketch": "late", "a": 2, "b": 3, "c": 1}),
        ({"sketch": "late", "a": 1, "c": 1}, None),  # the old behaviour is not an option here
        ({"sketch": "late", "a": 2}, None),
        ({"sketch": "late", "c": 1}, None),
        ({"sketch": "late", "a": 2, "c": 2}, None),
        ({"sketch": "late", "a": 2, "c": 1, "d": 0}, None),
        ({"sketch": "square", "a": 2, "c": 1}, None),
        ({"sketch": ["late"], "a": 2, "c": 1}, None),
        ({"a": 2, "c": 1}, None),
    ],
)
def test_what_old_records_leave_unsaid(
    written: dict[str, Any], spelled_out: dict[str, Any] | None
) -> None:
    """An old record does what was done before the decision existed. A config that was illegal stays
    illegal.
    """
    space = Space(toy().stage, toy().target, (Triangle(), Late()))  # type: ignore[arg-type]
    config = Config.from_json(json.loads(json.dumps(written)))
    found = space.spelled_out(config)
    if spelled_out is None:
        assert found == config and space.check(found) is not None
    else:
        assert found == Config.from_json(spelled_out) and space.check(found) is None


@given(st.integers(0, 1 << 30))
def test_a_mutation_changes_one_decision(seed: int) -> None:
    """Later decisions are kept if they are still options. The same seed gives the same mutation."""
    space, rng = toy(), Random(seed)
    before = space.sample(rng)
    after = space.mutate(before, rng)
    assert space.check(before) is None and space.check(after) is None and after != before
    again = Random(seed)
    assert (space.sample(again), space.mutate(before, again)) == (before, after)
    old, new = before.to_json(), after.to_json()
    changed = next(name for name in old if old[name] != new.get(name))
    behind = list(old)[list(old).index(changed) + 1 :]
    for name in set(behind) & set(new):
        legal = name != "b" or old["b"] < new["a"]
        assert not legal or new[name] == old[name]


def test_sampling_and_mutation_reach_every_config() -> None:
    space, rng = toy(), Random(1)
    every = set(space.configs())
    assert {space.sample(rng) for _ in range(400)} == every
    at, reached = space.sample(rng), set[Config]()
    for _ in range(1000):
        at = space.mutate(at, rng)
        reached.add(at)
    assert reached == every


@given(st.integers(0, 1 << 30))
def test_a_child_has_its_parents_choices(seed: int) -> None:
    """Each choice comes from one of the two parents. The child is legal, or there is none."""
    space, rng = toy(), Random(seed)
    one, other = space.sample(rng), space.sample(rng)
    child = space.crossover(one, other, Random(seed))
    assert child == space.crossover(one, other, Random(seed))
    if child is None:
        assert one != other
        return
    assert space.check(child) is None
    assert space.crossover(one, one, rng) == one
    for name, choice in child.to_json().items():
        assert choice in {one.to_json().get(name), other.to_json().get(name)}


@dataclass(frozen=True)
class Pair:
    """A sketch whose third decision has one option, which names the first two."""

    name = "pair"

    def next_decision(self, chosen: Mapping[str, Option]) -> Decision | None:
        if len(chosen) < 2:
            return Decision("ab"[len(chosen)], "block", (1, 2, 3))
        both = 10 * int(chosen["a"]) + int(chosen["b"])
        return None if "c" in chosen else Decision("c", "block", (both,))


def test_crossover_mixes_where_that_is_legal() -> None:
    """Decisions that depend on each other are taken together or not at all."""
    space, rng = toy(), Random(2)
    one, other, wrong = (
        Config("triangle", (("a", a), ("b", b))) for a, b in ((3, 0), (2, 1), (2, 2))
    )
    children = {space.crossover(one, other, rng) for _ in range(60)}
    assert {(c["a"], c["b"]) for c in children if c} == {(3, 0), (3, 1), (2, 0), (2, 1)}
    with pytest.raises(ValueError, match="no option"):
        space.crossover(one, wrong, rng)
    pairs = Space(space.stage, space.target, (Pair(),))  # type: ignore[arg-type]
    parents = [Config("pair", (("a", a), ("b", b), ("c", 10 * a + b))) for a, b in ((1, 2), (3, 1))]
    assert {pairs.crossover(*parents, rng) for _ in range(60)} == {*parents, None}


def test_a_space_of_one_config_has_no_mutation() -> None:
    kind = TensorType((4,), "int64")
    stage = make_stage([Operator("relax", ("x",), "y", kind)], {"x": kind}, [])
    space = space_of(stage, target("x86-64-v3"))
    config = space.sample(Random(0))
    assert space.size == 1 and space.mutate(config, Random(0)) == config == Config("fallback")
    assert space == space_of(stage, target("x86-64-v3")) != space_of(stage, target("x86-64-v4"))
    assert hash(space) == hash(space_of(stage, target("x86-64-v3")))
    assert space.sketches == space_of(stage, target("x86-64-v3")).sketches


def test_a_space_is_the_same_in_every_process() -> None:
    """Another process reads the record, so nothing in a space may depend on the process's hashes.
    """
    types = {"x": TensorType((50, 33)), "w": TensorType((33, 70))}
    stage = make_stage(
        [Operator("matmul", ("x", "w"), "y", TensorType((50, 70)))], types, ["w"]
    )
    code = (
        "import json, sys; from random import Random\n"
        "from gtco.machine.target import target; from gtco.tensor.sketch import space_of\n"
        "from gtco.tensor.stage import Stage\n"
        "space = space_of(Stage.from_json(json.loads(sys.argv[1])), target('x86-64-v4'))\n"
        "rng = Random(7)\n"
        "print([space.sample(rng).to_json() for _ in range(20)], space.size)"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code, json.dumps(stage.to_json())],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1 and "gemm" in said.pop()


def test_no_config_outside_the_space_is_built() -> None:
    """Rows of A that pass through a GELU are not in memory: reading them in place would use a
    stride of 0.
    """
    types = {"x": TensorType((5, 16)), "w": TensorType((16, 24))}
    gelu = Operator("gelu", ("x",), "h", types["x"])
    product = Operator("matmul", ("h", "w"), "y", TensorType((5, 24)))
    stage = make_stage([gelu, product], types, ["w"])
    machine = target("x86-64-v3")
    sketch = gemm.match(stage, machine)
    assert sketch is not None
    legal = next(configs(sketch))
    illegal = replace(
        legal, choices=tuple((k, "direct" if k == "a" else v) for k, v in legal.choices)
    )
    assert legal["a"] == "packed" and check(sketch, legal) is None
    answer = build_job(Job("kernel", stage, illegal, machine))
    assert isinstance(answer, Failure) and "a='direct' is none of the options" in answer.reason
    assert answer.rejected == "no option"
    assert not isinstance(build_job(Job("kernel", stage, legal, machine)), Failure)


def test_symbolic_sizes_have_no_bytes() -> None:
    kind = TensorType(("batch", 3))
    assert str(kind) == "float32[batchx3]" and TensorType((2, 3), "int64").nbytes == 48
    with pytest.raises(TypeError, match="'batch' is symbolic"):
        _ = kind.size
