"""MkDocs hook: links to files outside docs/ lead to the repository; a link to a missing file fails
the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

_LINK: Final = re.compile(r"\]\((\.\./[^)#\s]+)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page's text with such links rewritten."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def rewrite(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        outside = not path.startswith(("docs/", "../")) and Path(path).exists()
        return f"]({config.repo_url.rstrip('/')}/blob/main/{path}" if outside else match[0]

    return _LINK.sub(rewrite, markdown)
