"""The command line: usage, exit codes and errors. Other files test what each command does."""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from gtco import cli
from gtco.support.errors import ModelError
from gtco.support.pipes import until_closed
from gtco.support.version import __version__
from tests.cli.stand_ins import compiler, model


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["compile"],
        ["compile", "m.onnx", "--threads", "-1"],
        ["compile", "m.onnx", "--threads", "1025"],
        ["compile", "m.onnx", "--threads", "²"],
        ["run", "m.so", "--threads", str(2**32 + 1)],
        ["bench", "m", "--threads", "5000"],
        ["bench", "m", "--json", "/no such folder/a.json"],  # said before the measuring
        ["bench", "m", "--json", "/"],
        ["compile", "m.onnx", "--shape", "batch"],
        ["compile", "m.onnx", "--shape", "batch=0"],
        ["compile", "m.onnx", "--shape", "b=1", "--shape", "b=2"],
        ["compile", "m.onnx", "--workers", "0"],
        ["run"],
        ["run", "m.so", "--input", "x.npy"],
        ["run", "m.so", "--repeat", "0"],
        ["run", "m.so", "--input", "x=a.npy", "--input", "x=b.npy"],
        ["bench"],
        ["bench", "m", "--rounds", "x"],
    ],
)
def test_wrong_usage_exits_with_2(argv, compiler, model, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(argv)
    assert exit.value.code == 2
    assert "error:" in capsys.readouterr().err
    assert not compiler.calls


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("compile m.onnx --verfy", "gtco compile: error: unknown argument --verfy: did you mean"),
        ("run m.so --zzz=3", "gtco run: error: unknown argument --zzz=3\n"),
        ("farm check ray://a:1 --jsno", "unknown argument --jsno"),
        ("run -- m.so --seed=3", "--seed=3 stands behind --, and what stands there is no option"),
    ],
)
def test_an_unknown_argument_is_named_in_a_line(argv, said, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(argv.split())
    err = capsys.readouterr().err
    assert exit.value.code == 2 and said in err and len(err.splitlines()) == 2


def test_python_m_gtco_is_the_command(root):
    done = subprocess.run(
        [sys.executable, "-m", "gtco", "--version"], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("gtco ")


def test_version_and_help_exit_with_0(capsys):
    for argv, text in (
        [["--version"], "gtco 0."],
        [["--help"], "compile"],
        [["compile", "--help"], "--verify"],
    ):
        with pytest.raises(SystemExit) as exit:
            cli.main(argv)
        assert exit.value.code == 0 and text in capsys.readouterr().out


def test_the_version_names_what_compiles(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"gtco {__version__}"
    assert f"apache-tvm {metadata.version('apache-tvm')}" in second and "Python 3." in second


def test_an_unknown_precision_is_wrong_usage(capsys):
    for command in ("compile m.onnx", "inspect m.onnx", "bench m.onnx"):
        with pytest.raises(SystemExit) as exit:
            cli.main([*command.split(), "--precision", "fp8"])
        assert exit.value.code == 2 and "fp32" in capsys.readouterr().err


def test_an_error_is_a_message_and_exit_1_and_debug_shows_the_traceback(compiler, capsys):
    compiler.fail = ModelError("m.onnx is not an ONNX file")
    assert cli.main(["compile", "m.onnx"]) == 1
    err = capsys.readouterr().err
    assert "error: m.onnx is not an ONNX file" in err and "Traceback" not in err
    for argv in (["--debug", "compile", "m.onnx"], ["compile", "m.onnx", "--debug"]):
        with pytest.raises(ModelError):
            cli.main(argv)


WITHOUT_TVM = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
from gtco.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    "command",
    [
        "compile m.onnx",
        "tune m.onnx",
        "tune m.onnx --space",
        "candidates m.onnx --target cuda:sm_80",
        "inspect m.onnx",
    ],
)
@pytest.mark.parametrize(
    ("absent", "package"), [("tvm,onnx,networkx", "apache-tvm"), ("networkx", "networkx")]
)
def test_what_compiles_says_which_package_is_not_installed(command, absent, package, root):
    """As on a machine that has only the packages that gtco measure needs."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TVM, absent, *command.split()],
        cwd=root,
        capture_output=True,
        text=True,
    )
    name = " ".join(command.split()[:1])
    assert done.returncode == 1
    assert f"error: gtco {name} needs {package}, which is not installed: pip install" in done.stderr
    assert "gtco run, measure and records do without" in done.stderr
    assert "fault of gtco" not in done.stderr and "Traceback" not in done.stderr


def test_ctrl_c_exits_with_130(compiler, capsys):
    compiler.fail = KeyboardInterrupt()
    assert cli.main(["compile", "m.onnx"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compile", "tune", "candidates", "measure"])
def test_an_empty_name_is_named(command, capsys):
    assert cli.main([command, ""]) == 1
    said = capsys.readouterr().err
    assert "is a folder: give the name of a file" in said and "internal failure" not in said


def explained(parser):
    """Every parser below, with its arguments that have no help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, found in action.choices.items():
                for path, option in explained(found):
                    yield f"{name} {path}".strip(), option
        elif action.help is None and action.option_strings:
            yield "", action.option_strings[-1]


def test_every_option_is_explained():
    assert list(explained(cli.parser())) == []


@pytest.mark.parametrize(
    "module", ["gtco.cli --help", "gtco doctor --no-peak", "models list", "bench --help"]
)
def test_a_closed_pipe_is_no_error(module, root):
    """``| true`` ends before anything is written."""
    command = f"set -o pipefail; {{ sleep 0.3; {sys.executable} -m {module}; }} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0 and "roken" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("status", [0, 1])
def test_the_work_goes_on_where_nobody_reads_its_progress(status, root, tmp_path):
    """As with ``2>&1 | head -1``, or a service that closes its end. Its exit code stays too."""
    command = (
        "import sys, time; from gtco.support.pipes import until_closed; "
        "run = lambda: ([(print(n, file=sys.stderr), time.sleep(0.2)) for n in range(4)], "
        f"open('made', 'w').write('whole'), {status})[-1]; raise SystemExit(until_closed(run))"
    )
    script = 'cd "$0" && (PYTHONPATH="$1" "$2" -c "$3"; echo $? > status) 2>&1 | head -1'
    arguments = [str(tmp_path), str(root), sys.executable, command]
    done = subprocess.run(["bash", "-c", script, *arguments], capture_output=True, text=True)
    assert done.stdout == "0\n" and done.stderr == ""
    assert (tmp_path / "made").read_text() == "whole"
    assert int((tmp_path / "status").read_text()) == status


def test_an_error_of_another_file_is_none_of_the_output(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        until_closed(lambda: int((tmp_path / "absent").read_text()))


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_are_no_error(closed, root, tmp_path):
    """Services start processes so. A child of the command gets streams too."""
    command = (
        "import os, subprocess, sys; from gtco.support.pipes import until_closed; "
        "run = lambda: (print(1), print(2, file=sys.stderr), open('made', 'w').write("
        "str(subprocess.call(['sh', '-c', ': <&0 >&1 2>&2']))), 0)[-1]; "
        "raise SystemExit(until_closed(run))"
    )
    script = f'cd "$0" && PYTHONPATH="$1" "$2" -c "$3" {closed}'
    arguments = [str(tmp_path), str(root), sys.executable, command]
    done = subprocess.run(["bash", "-c", script, *arguments])
    assert done.returncode == 0 and (tmp_path / "made").read_text() == "0"
