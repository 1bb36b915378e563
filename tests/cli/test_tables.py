"""Tables in any width: which cells fit, fold or are left out, and that no number is ever cut."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtco.cli import console, stage_tables
from gtco.cli.inspection import Inspection
from gtco.cli.live import live
from gtco.cli.tables import DOTS, RULE, Table, fold, shortened
from gtco.search.calibration.peak import Peak
from gtco.tuning.view import StageView, View

WORDS = st.text("abcdefgh/._-+ ", max_size=60)


@given(WORDS, st.integers(1, 70))
def test_what_is_folded_is_whole_and_fits(text, width):
    lines = fold(text, width)
    assert all(len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert fold(text, 0) == [text]


def test_names_are_folded_behind_a_separator():
    assert fold("onnxruntime:optimizer 1.32.0", 22) == ["onnxruntime:optimizer", "1.32.0"]
    assert fold("encoder/layer_7/attention", 18) == ["encoder/layer_7/", "attention"]


@given(WORDS, st.integers(1, 70))
def test_a_shortened_name_keeps_both_ends(text, width):
    short = shortened(text, width)
    assert len(short) <= width
    if len(text) <= width:
        assert short == text
    elif width >= 3:
        head, tail = short.split(DOTS)
        assert text.startswith(head) and text.endswith(tail) and head and tail


def table() -> Table:
    made = Table("title")
    made.column("name", least=8)
    made.column("value", right=True)
    made.column("schedule", least=10, rank=2)
    made.column("bytes", right=True, rank=1)
    made.row("blocks.0.attention.projection", "123.456", "order=rows tile_m=6 tile_n=64", "10 kB")
    made.rule()
    made.row("all", "7", "", "1 kB")
    return made


def test_columns_leave_by_their_rank_and_are_named():
    wide = table().lines(200)
    assert wide[0] == "title" and RULE in wide[2] and "order=rows tile_m=6 tile_n=64" in wide[3]
    assert wide == table().lines(None) and not any("not shown" in line for line in wide)
    for width in range(36, 72):  # everything is there, in folded lines
        lines = table().lines(width)
        assert max(map(len, lines)) <= width and not any("not shown" in line for line in lines)
    narrow = table().lines(35)
    assert narrow[-1] == "(not shown at this width: schedule)" and "10 kB" in "".join(narrow)
    narrowest = table().lines(20)
    assert "(not shown at this" in narrowest and "123.456" in "".join(narrowest)
    assert max(map(len, narrowest)) <= 20


def view(stages: int) -> View:
    """A view with long names and large numbers."""
    one = StageView(
        "layer_norm+matmul+add+reshape+transpose+slice+attention",
        144,
        0.9,
        0.12345,
        0.98,
        250,
        "done",
    )
    return View("timing 12 candidates", (one,) * stages, ((61.2, 59.8),), 1234.0, 5678.0)


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("stages", [1, 40])
def test_the_live_view_keeps_its_numbers(width, stages):
    lines = live(view(stages)).lines(width)
    assert max(map(len, lines[1:])) <= width
    shown = "\n".join(lines)
    for number in ("123450.0", "7.290", "250", "59800.00", "1.023"):
        assert number in shown, number
    assert all(line.startswith("layer_") for line in lines if "123450.0" in line)
    if width > 60:
        assert "98%" in shown and "144" in shown and "done" in shown


STAGES = tuple(
    {
        "name": f"encoder.layers.{n}.self_attention.out_proj.residual",
        "operators": ["layer_norm", "matmul", "add", "gelu"],
        "inputs": ["float32[1x197x768]", "float32[768x3072]", "float32[3072]"],
        "output": "float32[1x197x3072]",
        "bytes": 12_345_678,
        "schedule": {"order": "rows", "micro_kernel": "fma:6x4", "prefetch": "both", "block": 96},
        "flops": 929_562_624,
        "predicted_seconds": 0.00412,
        "measured_seconds": 0.00425,
        "share_of_peak": 0.935,
    }
    for n in range(3)
)


def inspected(width, monkeypatch, capsys) -> str:
    monkeypatch.setattr(console, "width", lambda stream=None: width)
    peak = Peak(2, (234e9,), 0.0)
    seen = Inspection(STAGES, 2, peak, None, {"metadata": {}})
    stage_tables.show("vit.so", seen, True)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 100, 200, None])
def test_inspect_has_readable_columns_at_any_width(width, monkeypatch, capsys):
    out = inspected(width, monkeypatch, capsys)
    lines = out.splitlines()
    table = lines[: next(n for n, line in enumerate(lines) if line.startswith("precision"))]
    assert width is None or max(map(len, table)) <= width
    for number in ("929.6", "4.120", "4.250", "93.5%", "2788.7", "12.360", "12.750"):
        assert number in out, (number, out)
    widths = [len(rule) for rule in table[-2 if "not shown" not in out else -3].split()]
    assert min(widths) >= 1 and "layer_norm+matmul" in out
    assert ("micro_kernel=fma:6x4" in out) == (width not in (80, 100))
    assert ("not shown" in out) == (width in (80, 100))
    if width is None:  # a row is a line, however long
        assert len(table) == len(STAGES) + 5


def test_characters_that_an_encoding_lacks_are_replaced():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console.say("é…", stream)
    stream.flush()
    assert stream.buffer.getvalue() == b"??\n"


ON_A_TERMINAL = """
import fcntl, struct, sys, termios
fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, int(sys.argv[1]), 0, 0))
sys.path[:0] = [sys.argv[2]]
from gtco.support.torchless import import_tvm
import_tvm()
import time
from gtco.cli.console import Phases
from tests.cli.test_tables import view
with Phases() as progress:
    for n in range(3):
        time.sleep(0.06)
        progress("tune", None, view(20))
    progress("tune", 1.5, "done")
"""


@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_is_painted_over_and_left_clean(columns, root, tmp_path):
    """The test has its own small terminal, which follows the contents of the screen."""
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, str(columns), str(root)],
        stdout=theirs,
        stderr=theirs,
        stdin=theirs,
        cwd=tmp_path,
        env=environment,
    ) as process:
        os.close(theirs)
        read = b""
        while True:
            try:
                chunk = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            read += chunk
    os.close(ours)
    assert process.returncode == 0, read
    written = read.decode()
    assert written.count("123450.0") >= 3 * 12 and "59800.00" in written
    screen: list[str] = []
    for line in written.replace("\r", "").split("\n"):
        while line.startswith("\x1b["):
            up, _, line = line[2:].partition("F\x1b[J")
            del screen[-int(up) :]
        assert len(line) < columns
        screen.append(line)
    assert screen == [f"  {'tune':<12} {1.5:7.2f} s  done", ""]
