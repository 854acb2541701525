"""The page as one file: nothing is loaded from anywhere."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


def render(data: Mapping[str, Any], title: str) -> str:
    """The HTML document for what `leyline_evals.report.collect` returns."""
    # "</script>" or "<!--" inside a string would end or hide the data; escaped they cannot.
    content = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape(title),
        "style": _text("page.css"),
        "data": content,
        "script": _text("charts.js") + _text("page.js"),
    }
    page = _text("page.html")
    for name, text in parts.items():
        before, mark, after = page.partition(f"<!-- {name} -->")
        assert mark, f"page.html has no place for {name}"
        page = before + text + after
    return page


def _text(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
