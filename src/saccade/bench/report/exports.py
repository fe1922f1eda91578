"""Tables of a report for other programs: every number as CSV, and what a paper shows as LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict

from saccade.bench.report.tables import SHOWN, Cell, Content, comparison

_WORDS = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater", "|": "bar"}
_IN_LATEX = str.maketrans(
    {"[": "{[}"}  # which after the end of a row would begin an option
    | {character: rf"\text{word}{{}}" for character, word in _WORDS.items()}
    | {character: rf"\{character}" for character in "&%$#_{}"}
)


def comma_separated(runs: Sequence[Content]) -> str:
    """CSV of a row per run, task and method: every number, unrounded, with the ends of its interval."""
    rows = []
    for content in runs:
        for group in content.groups:
            for result in group.results.values():
                row = {"run": content.name, "task": group.name}
                for name, value in asdict(result).items():
                    parts = value if isinstance(value, dict) else {"": value}
                    row |= {f"{name}_{part}".rstrip("_"): number for part, number in parts.items()}
                rows.append(row)
    text = io.StringIO()
    lines = csv.DictWriter(text, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
    lines.writeheader()
    lines.writerows(rows)
    return text.getvalue()


def latex(runs: Sequence[Content]) -> str:
    """LaTeX of one ``tabular`` per run, in the form of the package booktabs."""
    parts = [r"% \usepackage{booktabs}"]
    for content in runs:
        table = comparison(content.groups[0])
        kept = [0, *(place for place, column in enumerate(table.columns) if column.name in SHOWN)]
        lines = [" & ".join(_escape(table.columns[place].name) for place in kept) + r" \\", r"\midrule"]
        for row in table.rows:
            lines.append(" & ".join(_cell(row.cells[place]) for place in kept) + r" \\")
        caption = " ".join(f"% {content.name}: {table.caption}".split())
        begin = rf"\begin{{tabular}}{{l{'r' * (len(kept) - 1)}}}"
        parts += ["", caption, begin, r"\toprule", *lines, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(parts) + "\n"


def _cell(cell: Cell) -> str:
    detail = "" if " of " in cell.detail else cell.detail
    return _escape(cell.text) + (rf" {{\scriptsize {_escape(detail)}}}" if detail else "")


def _escape(text: str) -> str:
    return " ".join(text.split()).translate(_IN_LATEX)
