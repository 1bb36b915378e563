"""Links between the pages: the file exists, and so does the heading that an anchor names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The names of the page's headings in links: lower case, with hyphens for spaces, and with a
    number after a name that occurs again.
    """
    found: set[str] = set()
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    for heading in re.findall(r"(?m)^#+ +(.+?) *$", text):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = next(n for n in range(100) if (f"{name}-{n}" if n else name) not in found)
        found.add(f"{name}-{number}" if number else name)
    return found


def dead(page: Path) -> list[str]:
    """The page's links within this repository that lead nowhere."""
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue  # a link into the web
        name, _, anchor = link.partition("#")
        there = page.parent / name if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dead(page) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# A `b`: c, d\n```\n# no heading\n```\n## Twice\n## Twice\n")
    good = "[a](b.md) [b](b.md#a-b-c-d) [c](b.md#twice-1) [d](#here) [e](https://x.y/#z)"
    bad = ["c.md", "b.md#no-heading", "b.md#twice-2", "#there"]
    page = tmp_path / "a.md"
    page.write_text(f"# Here\n{good} " + " ".join(f"[x]({link})" for link in bad))
    assert dead(page) == bad
