"""MkDocs hook: links to files outside docs/ lead to the repository; a link to a missing file fails
the build. The index of decisions lists every page of its folder.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

_LINK: Final = re.compile(r"\]\((\.\./[^)#\s]+)")
_DECISIONS: Final = re.compile(r"<!-- decisions\b.*?-->")
_TITLE: Final = re.compile(r"# (\d+)\. (.*)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page's text with such links rewritten, and with the list of decisions."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def rewrite(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        outside = not path.startswith(("docs/", "../")) and Path(path).exists()
        return f"]({config.repo_url.rstrip('/')}/blob/main/{path}" if outside else match[0]

    return _DECISIONS.sub(_list_decisions, _LINK.sub(rewrite, markdown))


def _list_decisions(_: re.Match[str]) -> str:
    pages = sorted(Path("docs/adr").glob("0*.md"))
    titles = [(page.name, _TITLE.match(page.read_text(encoding="utf-8"))) for page in pages]
    return "\n".join(
        f"- [ADR {title[1]}]({name}): {title[2]}" for name, title in titles if title is not None
    )
