"""The walk-through as a Jupyter notebook: text and code of a Markdown page, without the outputs that the page shows."""

from __future__ import annotations

import contextlib
import io
import json
import re
from typing import Any

_CODE = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)  # a block of code, and what it prints


def cells(page: str) -> list[tuple[str, str]]:
    """Return the cells of a page in order: ``markdown`` or ``code``, and the text."""
    found: list[tuple[str, str]] = []
    end = 0
    for match in _CODE.finditer(page):
        found += [("markdown", page[end : match.start()].strip()), ("code", match[1].rstrip())]
        end = match.end()
    return [cell for cell in (*found, ("markdown", page[end:].strip())) if cell[1]]


def outputs(page: str) -> list[str]:
    """Return what the page shows below each block of code; empty for blocks that print nothing."""
    return [match[2] or "" for match in _CODE.finditer(page)]


def executed(page: str) -> str:
    """Run the code of a page from top to bottom in one namespace, and return the page with what it prints now."""
    namespace: dict[str, Any] = {}

    def run(match: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(match[1], "<cell>", "exec"), namespace)
        shown = printed.getvalue()
        return f"```python\n{match[1]}```\n" + (f"\n```text\n{shown}```\n" if shown else "")

    return _CODE.sub(run, page)


def notebook(page: str) -> str:
    """Return the notebook (format 4.5) of a page, ready to write."""
    made: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells(page)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        cell["source"] = text.splitlines(keepends=True)
        made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"
