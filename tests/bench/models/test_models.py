"""The models and the commands of the benchmarks."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import time

import pytest

from bench import __main__ as entry
from bench.harness import machine
from bench.models.names import MODELS, SUITES, WIDER


def test_the_models_of_the_list_exist():
    pytest.importorskip("torch")
    from models import MODELS as KNOWN

    assert set(MODELS) <= set(KNOWN) and len(MODELS) == 8


def test_benchmarks_are_listed_and_exist(capsys, root):
    assert entry.main([]) == 2 and entry.main(["nonsense"]) == 2
    capsys.readouterr()
    assert entry.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, (folder, what) in entry.BENCHMARKS.items():
        assert name in out and what in out
        assert (root / "bench" / folder / f"{name}.py").is_file()
        assert callable(importlib.import_module(f"bench.{folder}.{name}").main)


def test_benchmarks_import_each_other_relatively(root):
    """Installed, the package is gtco.bench, and there is none that is called bench."""
    absolute = re.compile(r"^\s*(from|import) bench\b", re.MULTILINE)
    files = list((root / "bench").rglob("*.py"))
    assert files and not [path for path in files if absolute.search(path.read_text())]


@pytest.mark.parametrize(("name", "extra"), [("end_to_end", "bench"), ("language_model", "train")])
def test_a_missing_package_is_named(name, extra, monkeypatch, capsys):
    def missing(module, package=None):
        raise ModuleNotFoundError("No module named 'rich.console'", name="rich.console")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert entry.main([name]) == 1
    said = capsys.readouterr().err
    assert f"bench {name} needs rich, which is not installed" in said and f"[{extra}]" in said


def test_training_a_language_model_needs_no_package_that_the_extra_lacks(root):
    """rich, psutil and safetensors are of the extra ``bench``."""
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('rich', 'psutil', 'safetensors', 'nncf', 'openvino')))\n"
        "import bench.language.language_model"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_end_to_end_refuses_unknown_peers(capsys):
    assert entry.main(["end_to_end", "--peers", "nobody"]) == 1
    assert "unknown peer nobody" in capsys.readouterr().err


def test_the_machine_is_described():
    about = machine.describe(3)
    assert about["threads"] == 3 and about["cores"] >= 1 and about["memory_bytes"] > 1e8
    assert machine.installed("no-such-package-of-anyone") is None
    assert time.strptime(about["date"][:19], "%Y-%m-%dT%H:%M:%S")


@pytest.mark.parametrize(
    ("name", "millions", "tokens"),  # of the published models
    [
        ("vit-ti-16-batch16", 5.7, (16, 224)),
        ("vit-s-16-512", 22.4, (1, 512)),
        ("beit-b-16", 86.5, (1, 224)),
        ("swinv2-t", 28.3, (1, 256)),
        ("mobilevit-s", 5.6, (1, 256)),
    ],
)
def test_models_of_the_wide_suite_have_their_published_sizes(name, millions, tokens):
    import torch

    from bench.models.wide import MEMBERS

    assert set(WIDER) == set(MEMBERS)
    assert SUITES["wide"] == (*MODELS, *WIDER) and len(set(SUITES["wide"])) == 13
    with torch.device("meta"):
        module = MEMBERS[name].build()
    count = sum(parameter.numel() for parameter in module.parameters()) / 1e6
    assert abs(count - millions) < 0.02 * millions
    [(batch, channels, *size)] = MEMBERS[name].shapes
    assert (batch, channels, size) == (tokens[0], 3, [tokens[1]] * 2)
