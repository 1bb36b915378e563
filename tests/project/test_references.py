"""docs/reference agrees with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gtco import cli
from tests.project import references

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", references.PAGES)
def test_a_page_is_what_the_code_says(name):
    written = (references.FOLDER / name).read_text()
    assert written == references.PAGES[name](), "run python -m tests.project.references"
    assert {p.name for p in references.FOLDER.iterdir()} == set(references.PAGES)


def test_every_variable_that_is_read_is_in_the_table():
    """Python may read variables only in environment.py (test_layers.py); the C runtime reads some
    too.
    """
    text = (ROOT / "gtco/support/environment.py").read_text()
    read = set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', text))
    for file in (ROOT / "gtco/runtime/csrc").rglob("*.[ch]"):
        read |= set(re.findall(r'getenv\("(\w+)"\)', file.read_text()))
    table = references.variables()
    assert len(read) >= 3 and read == set(table)
    assert not [what for what in table.values() if what.count("(") != what.count(")")], "cut short"


def test_commands_and_flags_in_the_documentation_exist():
    """Those in indented examples and in the code of all pages and of the README."""
    known: dict[str, set[str]] = {}
    for name, parser, _ in references._commands(cli.parser()):
        flags = {flag for action in parser._actions for flag in action.option_strings}
        known.setdefault(name.split()[0], set()).update(flags | {"--debug"})
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    seen = 0
    for page in pages:
        for line in re.findall(
            r"gtco ((?:compile|tune|quantize|run|inspect|bench|records|doctor|measure|"
            r"candidates) [^`\n#]*)",
            page.read_text(),
        ):
            command, *words = line.split()
            for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", " ".join(words)):
                seen += 1
                assert flag in known[command], (page.name, line, flag)
    assert seen > 30
