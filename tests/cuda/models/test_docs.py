"""docs/cuda.md and docs/cuda-attention.md follow a product and an attention of ViT-Ti from the
model to PTX. Their listings, decisions and counts are those of the compiler. ``pytest tests/golden
tests/cuda/models/test_docs.py --update-golden`` writes the listings anew; the tables are written by
hand.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from gtco.codegen.cuda import listing
from gtco.codegen.jobs import GpuKernel
from gtco.codegen.nvrtc import compile_cuda
from gtco.codegen.sass import machine_code
from gtco.driver.phases import Built
from gtco.tensor.space import Pick, configs
from models.vit import VisionTransformer
from tests.cuda.compiling import Compiling, Once

DOCS = Path(__file__).parents[3] / "docs"
LISTING = r"(?s)```cuda\n(// \d+ x 1 x 1 blocks of .*?)```\n"
# A line of a table: the code, where it stands several times the others of its row, and how often.
COUNTED = r"(?m)^\| (`[^|]*`) \| (\d+)(?: each)? \|"


@pytest.fixture(scope="module")
def layer() -> Once:
    """ViT-Ti with two of its twelve layers. All layers but the last are the same; of the last one
    only one row is read.
    """
    model = VisionTransformer(width=192, heads=3, depth=2, image_size=(224, 224)).eval()
    return Once(model, (torch.zeros(1, 3, 224, 224),))


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden", default=False))


def shown(
    path: Path, built: Built, compiling: Compiling, update: bool
) -> tuple[GpuKernel, Pick, str]:
    """The kernel that the page lists (after it was compared with the listing), its pick, and the
    page.
    """
    page = path.read_text()
    there = re.search(LISTING, page)
    assert there
    symbol = re.search(r"gtco_[0-9a-f]{16}", there[1])
    assert symbol and symbol[0].removeprefix("gtco_") in built.generated.kernels, "another stage"
    key = symbol[0].removeprefix("gtco_")
    kernel = built.generated.kernels[key]
    assert isinstance(kernel, GpuKernel)
    program = compiling.programs[kernel.symbol, built.policy.target.name]
    printed = listing(program, kernel.images)
    if update:
        page = page.replace(there[1], printed)
        path.write_text(page)
    assert update or there[1] == printed, f"{path.name} shows what is printed no more"
    return kernel, built.generated.choices[key], page


def instructions(ptx: str) -> Counter[str]:
    """How often each instruction is in the text."""
    return Counter(re.findall(r"(?m)(?:^|[;{])\s*(?:@!?%?\w+\s+)?([a-z][\w.]*)", ptx))


def loop(ptx: str) -> str:
    """The longest part of the text that ends in a jump to its beginning."""
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.endswith(":")}
    jumps = ((at, re.search(r"\bbra(?:\.uni)?\s+(\S+);", line)) for at, line in enumerate(lines))
    loops = [lines[labels[to[1]] : at] for at, to in jumps if to and labels[to[1]] < at]
    return "\n".join(max(loops, key=len))


def counts(page: str, after: str) -> list[tuple[str, int]]:
    """(instruction, how often) from the table after the words ``after``."""
    table = page[page.index(after) :]
    return [
        (re.split(r"[ ;]", code.removeprefix("@p "), maxsplit=1)[0].removesuffix("..."), int(n))
        for row, n in re.findall(COUNTED, table)
        for code in re.findall(r"`([^`]+)`", row)
    ]


def test_a_product(layer: Once, compiling: Compiling, tmp_path: Path, update: bool) -> None:
    _, built = layer.compiled(tmp_path, "cuda:sm_80,sm_90a", compiling, precision="fp16")
    kernel, pick, page = shown(DOCS / "cuda.md", built, compiling, update)
    assert pick.config["row"] == "mma.m16n8k16" and pick.config["mapping"] == "(r)(c)(d)"
    image = compile_cuda(kernel.source, "sm_80", True)
    there = instructions(image.ptx.decode())
    for name, n in counts(page, "Of the PTX for it"):
        assert there[name] == n, name
    told = re.search(r"these are (\d+) LDGSTS, (\d+) LDSM, (\d+) HMMA, (\d+) LDG\.E", page)
    code = machine_code(image.cubin)[kernel.symbol]
    assert told and code.spilled == 0
    assert list(map(int, told.groups())) == [
        code.count(x) for x in ("LDGSTS", "LDSM", "HMMA", "LDG")
    ]


def test_an_attention(layer: Once, compiling: Compiling, tmp_path: Path, update: bool) -> None:
    _, built = layer.compiled(tmp_path, "cuda:sm_80", compiling, precision="fp16")
    kernel, pick, page = shown(DOCS / "cuda-attention.md", built, compiling, update)
    decided = dict(re.findall(r"(?m)^\| `(\w+)` \| (\w+) \|", page))
    assert decided == {name: str(option) for name, option in pick.config.choices}
    assert f"picks it from {len(list(configs(pick.sketch)))} configs" in page
    image = compile_cuda(kernel.source, "sm_80", True)
    there = instructions(loop(image.ptx.decode()))
    told: Counter[str] = Counter()
    for name, n in counts(page, "## The PTX"):
        told[name if name in there else next(x for x in there if x.startswith(name))] += n
    assert told == {name: there[name] for name in told}
    code = machine_code(image.cubin)[kernel.symbol]
    said = re.search(r"(\d+) HMMA, (\d+) LDSM, (\d+) LDGSTS, no spill, (\d+) registers", page)
    found = [*(code.count(x) for x in ("HMMA", "LDSM", "LDGSTS")), code.registers]
    assert said and list(map(int, said.groups())) == found and code.spilled == 0
