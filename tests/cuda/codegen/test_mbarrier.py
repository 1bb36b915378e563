"""Mbarriers (device/gtco/mbarrier.cuh) under the emulator, and their instructions. Accesses that
they order are not races; all others are.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from gtco.codegen.nvrtc import compile_cuda
from gtco.codegen.sass import machine_code
from gtco.tensor.cuda.program import CudaProgram
from tests.cuda.emulate import emulate
from tests.cuda.emulated_objects import Fault
from tests.kernels import fresh_seed

THREADS, TURNS = 64, 5
# One warp writes a row at a time, the other one reads it turned round.
KERNEL = """#include "gtco/mbarrier.cuh"
using namespace gtco;
extern "C" __global__ void __launch_bounds__(64) passing(
    const uint32_t* __restrict__ in0, uint32_t* __restrict__ out) {
  GTCO_SHARED(shared);
  uint32_t* const row = reinterpret_cast<uint32_t*>(shared);
  Mbarrier* const full = reinterpret_cast<Mbarrier*>(shared + 128);
  Mbarrier* const empty = full + 1;
  const int l = lane();
  if (whole_warp(warp() == 0)) {
    if (threadIdx.x == 0) {
      mbarrier_init(full, 32);
      mbarrier_init(empty, 1);
    }
  }
  sync<64>();
  if (whole_warp(warp() == 0)) {
#pragma unroll 1
    for (int i = 0; i < 5; ++i) {
      mbarrier_wait(empty, i % 2 ^ 1);
      row[l] = in0[i * 32 + l];
      mbarrier_arrive(full);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < 5; ++i) {
      mbarrier_wait(full, i % 2);
      out[i * 32 + l] = row[31 - l];
      sync_warp();
      mbarrier_arrive(empty, l == 0);
    }
  }
  // last
}
"""


def run(changes: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """The expected result and the kernel's, after these changes to its text."""
    text = KERNEL
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    rows = np.random.default_rng(fresh_seed()).integers(0, 1 << 32, (TURNS, 32), dtype=np.uint32)
    out = np.empty_like(rows)
    emulate(CudaProgram(text, (1, 1, 1), THREADS, 192), "passing", [rows], out, arch=900)
    return rows[:, ::-1], out


def test_what_is_passed_is_read() -> None:
    for _ in range(5):
        wanted, got = run({})
        np.testing.assert_array_equal(got, wanted)


READS, WRITES = "race: reads byte|never written", "race: writes byte"
FAULTS: dict[str, tuple[dict[str, str], str]] = {
    "no wait for what is full": ({"mbarrier_wait(full, i % 2);": ""}, READS),
    "no wait until it is empty": ({"mbarrier_wait(empty, i % 2 ^ 1);": ""}, f"{WRITES}|{READS}"),
    "the other parity": (
        {"mbarrier_wait(full, i % 2);": "mbarrier_wait(full, i % 2 ^ 1);"},
        f"{READS}|waits in mbarrier_wait",
    ),
    "never full": ({"mbarrier_arrive(full);": ""}, "waits in mbarrier_wait"),
    "never empty": ({"mbarrier_arrive(empty, l == 0);": ""}, "waits in mbarrier_wait"),
    "one that does not arrive": (
        {"mbarrier_arrive(full);": "mbarrier_arrive(full, l > 0);"},
        "waits in mbarrier_wait",
    ),
    "full too early": (
        {"mbarrier_init(full, 32)": "mbarrier_init(full, 31)"},
        f"{READS}|{WRITES}|waits in mbarrier_wait",
    ),
    "empty too early": (
        {"mbarrier_arrive(empty, l == 0);": "mbarrier_arrive(empty, l == 0 || l == 7);"},
        f"{READS}|{WRITES}|waits in mbarrier_wait",
    ),
    "an arrival ahead of what it tells": (
        {
            "row[l] = in0[i * 32 + l];\n": "",
            "mbarrier_arrive(full);": "mbarrier_arrive(full); row[l] = in0[i * 32 + l];",
        },
        f"{READS}|{WRITES}",
    ),
    "a lane that speaks for others": ({"sync_warp();": ""}, f"{WRITES}|{READS}"),
    "no barrier behind their making": ({"sync<64>();": ""}, "race: uses byte|no mbarrier"),
    "a place that is none": ({"mbarrier_wait(full,": "mbarrier_wait(full + 2,"}, "no mbarrier"),
    "not aligned": ({"shared + 128)": "shared + 132)"}, "not a multiple of 8"),
    "of nobody": ({"mbarrier_init(full, 32)": "mbarrier_init(full, 0)"}, "mbarrier of 0 arrivals"),
    "read as memory": (
        {"out[i * 32 + l] = row[31 - l];": "out[i * 32 + l] = row[32];"},
        "which is an mbarrier's",
    ),
    "written as memory": ({"// last": "row[l + 16] = 1;"}, "which is an mbarrier's|race"),
    "a barrier of the first ones": (
        {"// last": "if (warp() == 0) sync_first<32>(); row[l] = l;"},
        f"{READS}|{WRITES}",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults(what: str) -> None:
    changes, message = FAULTS[what]
    with pytest.raises(Fault, match=message):
        run(changes)


def test_a_barrier_of_some_threads() -> None:
    """It orders what these threads did, whatever the others do."""
    body = """#include "gtco/mbarrier.cuh"
extern "C" __global__ void __launch_bounds__(96) meeting(
    const uint32_t* __restrict__ in0, uint32_t* __restrict__ out) {{
  GTCO_SHARED(shared);
  uint32_t* const row = reinterpret_cast<uint32_t*>(shared);
  const int t = threadIdx.x;
  if (gtco::whole_warp(t >= 64)) {{
    out[t] = in0[t];
    return;
  }}
  row[t] = in0[t];
  {meet};
  out[t] = row[63 - t];
}}
"""
    x = np.random.default_rng(fresh_seed()).integers(0, 1 << 32, 96, dtype=np.uint32)
    out = np.empty_like(x)
    right = body.format(meet="gtco::sync_first<64>()")
    emulate(CudaProgram(right, (1, 1, 1), 96, 256), "meeting", [x], out, arch=900)
    np.testing.assert_array_equal(out, [*x[63::-1], *x[64:]])
    for wrong in ("gtco::sync_warp()", "gtco::sync<96>()", "gtco::sync_first<32>()"):
        program = CudaProgram(body.format(meet=wrong), (1, 1, 1), 96, 256)
        with pytest.raises(Fault, match=r"race|never written|divergent|sync of 32 threads"):
            emulate(program, "meeting", [x], out, arch=900)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("if (t < 96) gtco::give_registers<40>();", "waits in setmaxnreg"),
        (
            "if (t < 64) gtco::give_registers<40>(); else gtco::give_registers<48>();",
            "divergent",
        ),
        ("if (t % 2) gtco::give_registers<40>();", "divergent"),
    ],
)
def test_warp_groups_hand_registers_over(what: str, message: str) -> None:
    body = f"  const int t = threadIdx.x; {what} out[t] = in0[t];"
    text = re.sub(r"  GTCO_SHARED.*// last", body, KERNEL, flags=re.DOTALL).replace("(64)", "(128)")
    x = np.zeros(128, np.uint32)
    with pytest.raises(Fault, match=message):
        emulate(CudaProgram(text, (1, 1, 1), 128), "passing", [x], np.empty_like(x), arch=900)


def test_machine_code() -> None:
    image = compile_cuda(KERNEL, "sm_90a")
    assert not image.spills and not image.local
    code = machine_code(image.cubin)["passing"]
    names = [name for name in code.instructions if name.startswith("SYNCS")]
    for part in ("EXCH.64", "ARRIVE.TRANS64", "PHASECHK.TRANS64.TRYWAIT"):
        assert any(part in name for name in names), (part, names)
    assert not [name for name in code.instructions if name in ("BRA.DIV", "BRA.CONV")]
