"""``make docs``: the pages as a site. mkdocs is strict here: a page outside the navigation, a dead
link or a dead anchor ends the build.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from docs import site_hooks


def test_the_site_builds_and_fetches_nothing(root: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    pages = {page.relative_to(root / "docs") for page in (root / "docs").rglob("*.md")}
    for page in pages:
        name = "index.html" if page.name == "README.md" else page.with_suffix(".html").name
        text = (tmp_path / page.parent / name).read_text()
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//', text)
        assert not loaded, (page, loaded)
    assert "examples/c" in (tmp_path / "c-api.html").read_text()


def test_links_out_of_the_pages_become_text() -> None:
    class Page:
        class file:
            src_uri = "papers/gtco.md"

    given = "[a](helix.md) [the policy](../../gtco/search/policy.py) [c](../int8.md#x) "
    given += "[`x.py`](../../x.py)"
    wanted = "[a](helix.md) the policy (`gtco/search/policy.py`) [c](../int8.md#x) `x.py`"
    assert site_hooks.on_page_markdown(given, Page) == wanted
