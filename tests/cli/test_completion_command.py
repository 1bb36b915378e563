"""``gtco completion``: what a shell offers with the script."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gtco import cli


@pytest.fixture(scope="module")
def completed(tmp_path_factory):
    """The words that bash offers behind a line."""
    folder = tmp_path_factory.mktemp("completion")
    done = subprocess.run(
        [sys.executable, "-m", "gtco", "completion", "bash"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (folder / "script").write_text(done.stdout)
    (folder / "vit.onnx").touch()

    def complete(line: str) -> set[str]:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        commands = (
            f"source ./script; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; "
            '_shtab_gtco; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        ran = subprocess.run(["bash", "-c", commands], cwd=folder, capture_output=True, text=True)
        return {word.strip() for word in ran.stdout.split("\n")} - {""}

    return complete


def test_bash_completes_commands_options_and_files(completed) -> None:
    assert completed("gtco ins") == {"inspect"}
    assert completed("gtco records e") == {"export"}
    assert {"--precision", "--verify"} <= completed("gtco compile --")
    assert completed("gtco compile --precision b") == {"bf16"}
    assert "vit.onnx" in completed("gtco compile vit")


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_a_script(shell, capsys) -> None:
    assert cli.main(["completion", shell]) == 0
    assert "inspect" in capsys.readouterr().out


def test_without_shtab_the_error_says_how_to_get_it(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 1
    assert "pip install 'gtco[completion]'" in capsys.readouterr().err
