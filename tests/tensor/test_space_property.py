"""Every sketch's space: a config is rejected with a reason, or builds and is right.

Stages of every family are drawn (``tests/stages.py``), and configs of them, legal and illegal. The
module also tests what stages around one contraction share by the signatures of their sketches.
``pytest -m scheduled -s tests/tensor/test_space_property.py`` makes a long run with a new seed;
``GTCO_SPACE_SEED=N`` repeats one that failed.
"""

from __future__ import annotations

import ast
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import gtco
from gtco.codegen.load import load
from gtco.machine.target import Target
from gtco.search.analytic import AnalyticPolicy
from gtco.tensor.sketch import RULES, family, space_of
from gtco.tensor.space import Config, Decision, Program, Rejection, Sketch, Space, configs
from gtco.tensor.stage import Stage, make_stage
from tests.kernels import (
    EMULATED,
    allowed,
    assert_close,
    fresh_seed,
    linked,
    random_inputs,
    reference,
    runnable,
    small_tasks,
    targets,
)
from tests.stages import CONTRACTIONS, CORES, Drawing, drawn

REASONS = {"unknown sketch", "unknown decision", "no option", "left open"}
ENUMERATED = 4000  # configs of a space that are listed and compared with the answers of check


def machine_of(random: Random) -> Target:
    """A target of 8 or 16 lanes, or with a tile unit, with some number of cores: the space depends
    on all of these.
    """
    name = random.choice((*targets(), EMULATED))
    return replace(runnable(name), cores=random.choice((1, 2, 3, 8)))


def spoilt(config: Config, other: Config, random: Random) -> Config:
    """The config, changed so that it is illegal most of the time."""
    choices = list(config.choices)
    at = random.randrange(len(choices)) if choices else 0
    name, value = choices[at] if choices else ("", 0)
    match random.randrange(9):
        case 0:
            choices = choices[:at]
        case 1:
            choices.insert(at, ("more", 1))
        case 2:
            random.shuffle(choices)
        case 3 if choices:
            choices[at] = (name, str(value) if isinstance(value, int) else 7)
        case 4 if choices:
            choices[at] = (name, True)
        case 5 if choices:
            choices[at] = (name, random.choice((0, -1, 10**9, "direct", "0x0", "")))
        case 6 if choices:
            choices[at] = ("other", value)
        case 7:
            return Config(random.choice(("gemm", "no such sketch", "")), config.choices)
        case _:
            return other
    return Config(config.sketch, tuple(choices))


def same(a: Config, b: Config) -> bool:
    """True if the configs are equal; True and 1 differ."""
    kinds = [[type(value) for _, value in config.choices] for config in (a, b)]
    return a == b and kinds[0] == kinds[1]


def check_space(space: Space, random: Random, other: Config, seen: Counter[str]) -> list[Config]:
    """Checks the part of the property that needs no build; gives legal configs to be built."""
    config = space.sample(random)
    mutant = space.mutate(config, random)
    for legal in (config, mutant):
        assert space.check(legal) is None, (legal, space.check(legal))
        assert Config.from_json(json.loads(json.dumps(legal.to_json()))) == legal
        chosen: dict[str, Any] = {}
        while decision := space.next_decision(chosen):
            assert decision.options and len(set(decision.options)) == len(decision.options)
            chosen[decision.name] = legal.to_json()[decision.name]
    child = space.crossover(mutant, space.sample(random), random)
    assert child is None or space.check(child) is None
    every = list(islice(space.configs(), ENUMERATED))
    assert len(set(every)) == len(every)
    assert mutant != config or len(every) == 1
    for _ in range(12):
        written = spoilt(config, other, random)
        answer = space.check(written)
        seen[answer.reason if answer else "legal all the same"] += 1
        if answer is None:
            assert len(every) == ENUMERATED or any(same(written, c) for c in every), written
        else:
            assert answer.reason in REASONS and answer.detail
            assert not any(same(written, c) for c in every), (written, answer)
            assert space.build(written, "k") == answer
    return list(dict.fromkeys((config, mutant)))


def stages(seed: int) -> Iterator[tuple[str, Stage, Random]]:
    """Stages of one family after the other, without end."""
    number = 0
    while True:
        core = CORES[number % len(CORES)]
        what = f"{seed}:{number}"
        stage = drawn(core, Random(what), Random(what + "l"), Random(what + "d").choice((0, 1, 2)))
        yield what, stage, Random(what + "c")
        number += 1


def run(seed: int, count: int, seconds: float) -> tuple[Counter[str], Counter[str]]:
    """Tests the property on ``count`` stages, or for ``seconds``. Gives how often each sketch was
    built, and how often a config was rejected for each reason.
    """
    built: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    other = Config("gemm", (("tile", "4x2"),))
    end = time.monotonic() + seconds
    for what, stage, random in islice(stages(seed), count):
        if time.monotonic() > end:
            break
        machine = machine_of(random)
        with small_tasks() if random.random() < 0.5 else nullcontext():
            space = space_of(stage, machine)
            if not space.sketches:
                continue
            try:
                legal = check_space(space, random, other, seen)
                check_kernels(space, legal, machine, random)
            except Exception as error:
                error.add_note(f"stage {what} on {machine.mcpu}: {json.dumps(stage.to_json())}")
                raise
        other = legal[0]
        built.update(c.sketch for c in legal)
    return built, seen


def check_kernels(space: Space, legal: list[Config], machine: Target, random: Random) -> None:
    """Checks that legal configs build and are right."""
    programs = {}
    for number, config in enumerate(legal):
        program = space.build(config, f"k{number}")
        if isinstance(program, Rejection):
            # Relax may turn an operator into one of a kind that has no kernel
            assert program.reason == "no program" and config.sketch == "fallback", program
            continue
        programs[config] = program
    if not programs:
        return
    library = load([p.function for p in programs.values()], machine)
    inputs = random_inputs(space.stage, random.randrange(1 << 30))
    wanted = reference(space.stage, inputs)
    tolerance = allowed(space.stage, inputs)
    for number, config in enumerate(legal):
        if isinstance(program := programs.get(config), Program):
            got = linked(library, f"k{number}", space.stage, program)(*inputs, unaligned=True)
            try:
                assert_close(got.astype(np.float64), wanted, tolerance)
            except AssertionError as error:
                error.add_note(f"config {config.to_json()}")
                raise


def test_every_config_is_rejected_or_right() -> None:
    built, seen = run(1, 4 * len(CORES), 1e9)
    rules = {family(rule) for rule in RULES}
    assert rules <= built.keys() | {"convolution", "dot"}, f"never built: {rules - built.keys()}"
    assert seen.keys() >= REASONS, seen


@pytest.mark.scheduled
def test_every_config_is_rejected_or_right_for_long() -> None:
    seed = int(os.environ.get("GTCO_SPACE_SEED", fresh_seed()))
    print(f"GTCO_SPACE_SEED={seed}")
    built, seen = run(seed, 1_000_000, float(os.environ.get("GTCO_SPACE_SECONDS", 600)))
    print("built:", dict(built.most_common()))
    print("rejected:", dict(seen.most_common()))


# signatures ---------------------------------------------------------------------------------------
def signed(seed: int, around: int) -> dict[object, list[Sketch]]:
    """Sketches by their signatures. They are of contractions of a few sizes, so that many differ in
    one extent only; each has several surroundings, and all are for one target.
    """
    found: dict[object, list[Sketch]] = defaultdict(list)
    target = replace(runnable("x86-64-v3"), cores=3)
    for number in range(len(CONTRACTIONS) * 30):
        core, what = CONTRACTIONS[number % len(CONTRACTIONS)], f"{seed}:{number}"
        for n in range(around):
            depth = 0 if n == 0 else 2
            stage = drawn(core, Random(what), Random(f"{what}:{n}"), depth, (3, 16))
            for sketch in space_of(stage, target).sketches:
                signature = getattr(sketch, "signature", None)
                if signature is not None:
                    found[signature].append(sketch)
    return found


def test_policies_know_roles() -> None:
    """No policy, and no part of the tuner, names a sketch or a decision."""
    known: set[object] = set()
    for _, stage, random in islice(stages(5), 4 * len(CORES)):
        space = space_of(stage, machine_of(random))
        for sketch in space.sketches:
            known |= {sketch.name, *(d.name for d in first_path(sketch))}
    assert {"gemm", "tile", "kc", "rows", "chunks_m", "fallback"} <= known
    known -= {"attention"}  # the operator, which has its products counted
    root = Path(gtco.__file__).parent
    policies = [root / "search" / f"{name}.py" for name in ("policy", "analytic", "recorded")]
    for path in (*policies, *root.glob("tuning/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Constant) and node.value in known
            assert not named, f"{path.name}:{getattr(node, 'lineno', 0)} names {ast.unparse(node)}"


def test_equal_signatures_are_equal_spaces_and_loop_prices() -> None:
    """A policy uses its result for one of them for the others too."""
    policy = AnalyticPolicy(replace(runnable("x86-64-v3"), cores=3))
    compared: Counter[str] = Counter()
    for sketches in signed(0, 5).values():
        first = sketches[0]
        wanted = policy._worked_out(first)
        for sketch in sketches[1:]:
            labels = f"{first.stage.label} and {sketch.stage.label}"
            found = policy._worked_out(sketch)
            assert found.configs == wanted.configs, labels
            for a, b in ((found.loops, wanted.loops), (found.shares, wanted.shares)):
                np.testing.assert_array_equal(a, b, labels)
            for a, b in zip(found.counts, wanted.counts, strict=True):
                np.testing.assert_array_equal(a, b, labels)
            chosen = first_path(first), first_path(sketch)
            assert chosen[0] == chosen[1], labels
            compared[sketch.name] += 1
    names = ("gemm", "strassen", "convolution", "winograd", "attention")
    assert all(compared[name] >= 10 for name in names), compared


def first_path(sketch: Sketch) -> list[Decision]:
    """The decisions on the way to the last config, with all of their options. This includes those
    that the policy does not look at.
    """
    chosen: dict[str, int | str] = {}
    path: list[Decision] = []
    while decision := sketch.next_decision(chosen):
        path.append(decision)
        chosen[decision.name] = decision.options[-1]
    return path


DEGENERATE = (0, 1, 1, 2, 17)


def degenerate(seed: int, count: int) -> Iterator[tuple[str, list[Stage]]]:
    """Stages of every family whose sizes are mostly 0 and 1. If no sketch takes the whole stage,
    its operators come one by one, as in the compiler. Illegal stages are left out.
    """
    machine = runnable("x86-64-v3")
    for number in range(count):
        core, what = CORES[number % len(CORES)], f"{seed}:{number}"
        depth = Random(what + "d").choice((0, 0, 1))
        try:
            stage = drawn(core, Random(what), Random(what + "l"), depth, DEGENERATE)
        except (ValueError, IndexError, ZeroDivisionError):  # illegal windows and broadcasts
            continue
        groups = [op.get("groups", 1) for op in stage.operators]
        if 0 in groups or any(d < 0 for t in stage.types.values() for d in t.sizes):
            continue
        whole = bool(space_of(stage, machine).sketches)
        yield what, [stage] if whole else [
            make_stage([op], stage.types, stage.constants) for op in stage.operators
        ]


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
def test_stages_of_nothing_and_of_one_are_rejected_or_right() -> None:
    """The result is zeros or NaN if an operator reduces no elements; no rule and no policy
    raises.
    """
    built: Counter[str] = Counter()
    machine = runnable("x86-64-v3")
    for what, parts in degenerate(0, 6 * len(CORES)):
        for stage in parts:
            policy, random = AnalyticPolicy(machine), Random(what)
            space = space_of(stage, machine)
            assert space.sketches, stage.label
            every = [next(configs(sketch)) for sketch in space.sketches]
            best = policy.choose(stage)
            assert not policy.failures and best is not None, (what, policy.failures)
            try:
                check_kernels(space, list(dict.fromkeys([*every, best.config])), machine, random)
            except Exception as error:
                error.add_note(f"stage {what}: {json.dumps(stage.to_json())}")
                raise
            built.update(c.sketch for c in every)
    assert built["fallback"] > 100 and len(built) > 8, built


@pytest.mark.parametrize("kind", ["resize2d", "grid_sample", "avg_pool2d"])
def test_an_image_without_pixels_is_not_sampled(kind: str) -> None:
    d = Drawing(Random(0), Random(0), 0)
    x = d.input((1, 0, 5, 3))
    if kind == "resize2d":
        how = dict(method="linear", coordinates="half_pixel", rounding="", cubic_alpha=-0.75)
        d.add(kind, x, out=(1, 4, 4, 3), layout="NHWC", **how)
    elif kind == "avg_pool2d":
        how = dict(kernel=(2, 2), strides=(1, 1), padding=(1, 1, 1, 1), count_include_pad=0)
        d.add(kind, x, out=(1, 1, 6, 3), layout="NHWC", **how)
    else:
        how = dict(method="linear", padding="border", align_corners=True)
        d.add(kind, x, d.input((1, 4, 4, 2)), layout="NHWC", **how)
    space = space_of(d.stage(), runnable("x86-64-v3"))
    answer = space.build(Config("fallback", ()), "k")
    assert [s.name for s in space.sketches] == ["fallback"]
    assert isinstance(answer, Rejection) and "without pixels" in answer.detail


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int4"])
@pytest.mark.parametrize(
    "types",
    [
        {"x": (0, 7), "w": (7, 5)},
        {"x": (3, 0), "w": (0, 5)},
        {"x": (3, 7), "w": (7, 0)},
    ],
)
def test_a_product_of_nothing_is_no_failure(types: dict[str, Any], dtype: str) -> None:
    """It has no tiles. The fallback takes it, and the result is empty or zeros."""
    d = Drawing(Random(0), Random(0), 0)
    x, w = d.input(types["x"]), d.input(types["w"], True, dtype)
    d.add("matmul", x, w)
    policy = AnalyticPolicy(runnable("x86-64-v3"))
    best = policy.choose(d.stage())
    assert not policy.failures and best is not None and best.sketch.name == "fallback"
    space = space_of(d.stage(), policy.target)
    check_kernels(space, [best.config], policy.target, Random(0))
