"""Generated parts of the pages on methods: facts, options, and papers' figures beside ours."""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from saccade.draft.heads.registry import HEAD_KINDS
from saccade.errors import SaccadeError
from saccade.methods import METHODS
from saccade.methods.settings import table

_BLOCK = re.compile(r"(<!-- generated: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_FIGURES = Path(__file__).parent / "figures.toml"
_ANSWER = {True: "lossless", False: "**lossy**: the answer may differ from the target's own"}


def filled(text: str, results: Path) -> str:
    """Return a page with its generated blocks written again."""
    kinds: dict[str, Callable[[str], Iterator[str]]] = {
        "facts": _facts,
        "options": _options,
        "figures": lambda name: _comparison(name, results),
        "list": _list,
    }

    def block(found: re.Match[str]) -> str:
        kind, _, words = found[2].partition(" ")
        if kind not in kinds:
            raise SaccadeError(f"Nothing generates {found[2]!r}; expected one of {', '.join(kinds)}.")
        return f"{found[1]}\n" + "\n".join(kinds[kind](words)) + f"\n\n{found[3]}"

    return _BLOCK.sub(block, text)


def _list(_: str) -> Iterator[str]:
    yield "| method | drafter | |\n|---|---|---|"
    for name, method in METHODS.items():
        page = f"[`{name}`]({name}.md)"
        yield f"| {page} | {method.needs} | {_cell(method.summary.removeprefix('LOSSY: '))} |"


def _facts(name: str) -> Iterator[str]:
    method = METHODS[name]
    yield "| | |\n|---|---|"
    yield f"| answer | {_ANSWER[method.lossless]} |"
    yield f"| drafter | {method.needs} |"
    if method.source:
        yield f"| source | {_cell(method.source)} |"
    use = f"-m {name}" if method.needs == "nothing" else f"-d DRAFTER -m {name}"
    if name in HEAD_KINDS:
        use = f"-d HEAD -m {name}"
    yield f'| use | `saccade generate -t TARGET {use} "..."`; `vlm.using("{name}")` |'


def _options(name: str) -> Iterator[str]:
    for brings, rows in table(METHODS[name].settings):
        if brings:
            continue  # what other choices would bring is in `saccade methods NAME`
        yield "| option | default | | values |\n|---|---|---|---|"
        for option, default, limits in rows:
            yield f"| `{option}` | {_value(default)} | {_cell(limits.meaning)} | {_cell(limits.range)} |"
    if any(brings for brings, _ in table(METHODS[name].settings)):
        yield f"\nOther choices bring options of their own, which `saccade methods {name}` lists."


def _comparison(name: str, results: Path) -> Iterator[str]:
    """A paper's figures beside those of our page on the same table."""
    content = tomllib.loads(_FIGURES.read_text(encoding="utf-8"))[name]
    page, measure = content["page"], content["measure"]
    ours = _measured(results / f"{page}.csv")
    paper: list[tuple[str, str]] = []  # column, key in a row
    if "paper" in content:
        paper = [("paper, speed-up", "speedup")] * content.get("speedup", True) + [(f"paper, {measure}", "tau")]
    kept = any("kept" in row for row in content["row"])
    paper += [("paper, score kept", "kept")] * kept
    here = ["speed-up", measure, *(["score kept"] if kept or content.get("kept") else [])]
    if "paper" in content:
        yield f"*Paper*: {content['paper']}.  "
    yield f"*Here*: the built-in pair, [{page}](../results/{page}.md), 95 % intervals.\n"
    heads = ["", *(column for column, _ in paper), *(f"here, {column}" for column in here)]
    yield "| " + " | ".join(heads) + " |\n|---" + "|--:" * (len(heads) - 1) + "|"
    for row in content["row"]:
        mine = ours.get(row["here"], {})
        cells = [row["name"], *(_number(row.get(key), key) for _, key in paper), *(mine.get(c, "–") for c in here)]
        yield "| " + " | ".join(cells) + " |"
    if any(row["here"] not in ours or ("paper" in content and "tau" not in row) for row in content["row"]):
        yield "\n–: not measured here, or not in the paper."
    if paper:
        yield "\nModels, prompts and hardware differ: compare orders, not sizes."


def _measured(numbers: Path) -> dict[str, dict[str, str]]:
    """Comparison of all tasks in a page's file of numbers: by method, quantity to value with its interval."""
    with numbers.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["section"] == "comparison"]
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["task"] == rows[0]["task"]:
            interval = f" [{row['low']}, {row['high']}]" if row["low"] else ""
            found.setdefault(row["method"], {})[row["quantity"]] = row["value"] + interval
    return found


def _number(value: Any, key: str) -> str:
    return "–" if value is None else f"{value:.3f}" if key == "kept" else f"{value:.2f}"


def _value(value: Any) -> str:
    return "empty" if value == "" else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
