"""Hooks of mkdocs: what the pages need beside Markdown to be a site."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files of the repository that are not pages (``../examples/c``) become their text and
    the file's name: a site that is read elsewhere has no such files.
    """
    folder = posixpath.dirname(page.file.src_uri)

    def text_alone(link: re.Match[str]) -> str:
        words, target = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if ":" in target or not path.startswith("../"):
            return link.group(0)
        name = path.removeprefix("../")
        return words if name in words else f"{words} (`{name}`)"

    return LINK.sub(text_alone, markdown)
