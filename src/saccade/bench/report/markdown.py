"""The report's tables as Markdown, to be pasted into documents."""

from __future__ import annotations

import re
from collections.abc import Sequence

from saccade.bench.record import warned
from saccade.bench.report import tables
from saccade.bench.report.content import Content


def document(contents: Sequence[Content]) -> str:
    """All runs: what was run, the tables, and what the columns mean."""
    parts = []
    if len(contents) > 1:
        parts.append(table(tables.overview(contents)))
    for content in contents:
        header = content.run.header
        parts.append(f"## {_escape(content.name)}")
        facts = ", ".join(
            f"{k} {v}" for k, v in header.environment.items() if isinstance(v, str | int | float)
        )
        parts.append(_escape(f"Started {header.started}. {facts}."))
        parts += [table(tables.comparison(group)) for group in content.groups]
        by_fact = tables.scores(content.groups[0])
        if by_fact is not None:
            parts.append(table(by_fact))
        parts += map(_escape, warned(content.run.records))
        if content.problems:
            parts.append(f"{len(content.problems)} lines of the run could not be read and are left out.")
    meanings = {
        c.name: c.meaning for content in contents for c in tables.comparison(content.groups[0]).columns
    }
    parts.append("\n".join(f"- {name}: {meaning}." for name, meaning in meanings.items()))
    return "\n\n".join(parts) + "\n"


def table(content: tables.Table) -> str:
    """One table under its caption."""
    heads = [_escape(column.name) for column in content.columns]
    lines = [heads, *([_cell(cell) for cell in row.cells] for row in content.rows)]
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    rows.insert(1, "|---" + "|--:" * (len(heads) - 1) + "|")
    return f"**{_escape(content.caption)}**\n\n" + "\n".join(rows)


def _cell(cell: tables.Cell) -> str:
    return f"{_escape(cell.text)} {cell.detail}".strip()  # details are made here and hold nothing special


def _escape(text: str) -> str:
    """Text that means itself, on one line."""
    return re.sub(r"([\\`*_|<>#&\[\]])", r"\\\1", " ".join(text.split()))
