"""gtco compile passes on the user's options, and shows what the compiler reports."""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

from pathlib import Path

import pytest

from gtco import cli
from gtco.tuning.view import StageView, View
from gtco.tuning.whole import ModelVerdict
from gtco.verification import Difference, VerificationReport
from gtco.verification.report import Top1
from tests.cli.stand_ins import Report, compiler


def test_compile_hands_on_every_option(compiler, capsys):
    argv = (
        "compile m.onnx -o out/v.so --target znver4 --precision bf16 --threads 3 --verify "
        "--verify-layers --dump d --shape batch=2 --shape h=224 --dim w=8,9 --no-simplify "
        "--simplify-timeout 9 --workers 2 --strict --no-cache --policy language-model "
        "--no-fast-algorithms"
    ).split()
    assert cli.main(argv) == 0
    model, output, options = compiler.calls[0]
    assert (model, output) == (Path("m.onnx"), Path("out/v.so"))
    options.pop("progress")
    assert options == {
        "target": "znver4",
        "precision": "bf16",
        "launches": "graph",
        "ptx": True,
        "threads": 3,
        "fast_algorithms": False,
        "verify": True,
        "verify_layers": True,
        "dump": Path("d"),
        "shapes": {"batch": 2, "h": 224},
        "dims": {"w": [8, 9]},
        "simplify": False,
        "simplify_timeout": 9,
        "workers": 2,
        "strict": True,
        "tune": "off",
        "policy": "language-model",
        "records": None,
        "cache": False,
    }
    out, err = capsys.readouterr()
    assert "2.00 GB" in out and "12.000 ms" in out and "2.5 s" in out
    assert "note: stage s1 fell back [slow]" in out
    assert "import" in err and "0.50 s" in err and "74 [bold] operators" in err


def test_compile_defaults(compiler):
    assert cli.main(["compile", "a/vit.onnx"]) == 0
    _, output, options = compiler.calls[0]
    assert output == Path("vit.so")  # in the current folder
    options.pop("progress")
    assert options == {
        "target": "native",
        "precision": "fp32",
        "launches": "graph",
        "ptx": True,
        "threads": 0,
        "fast_algorithms": True,
        "verify": False,
        "verify_layers": False,
        "dump": None,
        "shapes": None,
        "dims": None,
        "simplify": True,
        "simplify_timeout": 120,
        "workers": None,
        "strict": False,
        "tune": "quick",
        "policy": "analytic",
        "records": None,
        "cache": True,
    }
    assert cli.main(["compile", "m.onnx", "-o", "m.dll"]) == 1


@pytest.mark.parametrize(
    ("flags", "tune"),
    [
        ("", "quick"),
        ("--target native", "quick"),
        ("--target znver4", "off"),  # another machine cannot be measured
        ("--tune off", "off"),
        ("--tune full", "full"),
        ("--target znver4 --tune quick", "quick"),  # the compiler refuses it
    ],
)
def test_what_is_measured_by_default(compiler, flags, tune):
    assert cli.main(["compile", "m.onnx", *flags.split()]) == 0
    assert compiler.calls[0][2]["tune"] == tune


def test_compile_shows_what_measuring_took_and_gained(compiler, capsys):
    stages = (
        StageView("matmul+add", 12, 3e-4, 2e-4, 0.91, 16, "open"),
        StageView("softmax", 12, 1e-5, 1e-5, None, 0, "waiting"),
    )
    view = View("", stages, ((4e-3, 2.6e-3),), elapsed=9.5, remaining=0.0, changed=1, hour=1e-4)
    settled = ModelVerdict(frozenset({"some", "other"}), True, 4.2e-3, 2.7e-3)
    compiler.report = Report(tuned=view, fusion="3 partitions measured", settled=settled)
    assert cli.main(["compile", "m.onnx"]) == 0
    out = capsys.readouterr().out
    assert "partition" in out and "3 partitions measured" in out and "in the model" in out
    assert "a run of the whole model: 4.20 -> 2.70 ms; 2 picks and the partition" in out
    assert "9.5 s of it: 16 candidates of 1 stage measured, 1 pick changed" in out
    assert "gained: 4.00 -> 2.60 ms (1.538 times) by 16 candidates in 10 s" in out
    assert "92% matmul+add (91% of the peak); 5% softmax" in out
    assert "1 of 2 stages were not measured" in out
    assert "expected gain from one more hour: 0.10 ms" in out


def test_what_is_said_of_measuring_agrees_with_itself(compiler, capsys):
    """A gain that rounds to none is not called a gain. Each time says what it is a time of.
    Candidates of partitions that were given up count as measured.
    """
    stages = (StageView("matmul", 1, 3.41e-4, 3.404e-4, None, 24, "done"),)
    view = View("", stages, ((3.41e-4, 3.404e-4),), 9.5, 0.0, changed=1, others=64)
    settled = ModelVerdict(frozenset(), False, 3.2e-4, 3.2e-4)
    compiler.report = Report(tuned=view, settled=settled)
    assert cli.main(["compile", "m.onnx"]) == 0
    out = capsys.readouterr().out
    assert "88 candidates in 10 s: none is faster by more than the noise" in out
    assert "gained: " not in out and "(1.00" not in out
    assert "24 candidates of 1 stage and 64 of other partitions measured" in out
    assert "by the model of the machine" in out
    assert "stages timed alone add up to 0.341 -> 0.340 ms" in out
    assert "a run of the whole model: 0.320 ms, as before" in out


def test_compile_shows_the_verification(compiler, capsys):
    found = (
        Difference("large", "logits", 2e-4, 3e-6),
        Difference("spike", "logits", 0.5, 0.2, unstable=True),
        Difference("zeros", "logits", 1e-9, 1e-6, judged=True, reference_error=5.7e-8),
    )
    report = VerificationReport("ONNX Runtime", 1e-3, found, judge="float64 (ONNX)")
    compiler.report = Report(verification=report)
    assert cli.main(["compile", "m.onnx", "--verify"]) == 0
    out = capsys.readouterr().out
    assert "agrees with ONNX Runtime" in out and "2.00e-04" in out and "3.00e-06" in out
    (unstable,) = (line for line in out.splitlines() if "spike" in line)
    assert "5.00e-01" in unstable and "unstable" in unstable and "wrong" not in out
    (judged,) = (line for line in out.splitlines() if "zeros" in line)
    assert "float64 agrees" in judged
    said = "decided 1 of them; ONNX Runtime's own error against it is up to 5.7e-08"
    assert said in " ".join(out.split())
    report = VerificationReport("ONNX Runtime", 1e-3, found[:2], unjudged="it has no own.Strange")
    compiler.report = Report(verification=report)
    assert cli.main(["compile", "m.onnx", "--verify"]) == 0
    assert "float64 could not decide: it has no own.Strange" in capsys.readouterr().out
    report = VerificationReport("ONNX Runtime", 0.06, found, Top1(32, 31, 0))
    compiler.report = Report(verification=report)
    assert cli.main(["compile", "m.onnx", "--verify", "--precision", "bf16"]) == 0
    assert "the same class first on 31 of 32 images" in capsys.readouterr().out


def test_a_library_from_the_cache_says_so(compiler, capsys):
    compiler.report = Report(cached="2026-01-02T03:04:05+00:00")
    assert cli.main(["compile", "m.onnx"]) == 0
    assert "from the cache" in (out := capsys.readouterr().out) and "2026-01-02T03:04:05" in out
