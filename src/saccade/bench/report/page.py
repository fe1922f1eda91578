"""Report as one self-contained HTML file: no network, fonts or further files."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from saccade.bench.claims import sentences
from saccade.bench.headline import cautions, headline
from saccade.bench.records import warned
from saccade.bench.repeating import commands
from saccade.bench.report import figures, tables, traces
from saccade.bench.report.content import Content
from saccade.bench.report.signal_figures import drawn_signals
from saccade.bench.suite import BASELINE
from saccade.errors import SaccadeError


def render(contents: Sequence[Content], prompts: int) -> str:
    """Render the page."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as problem:
        raise SaccadeError("Reports need Jinja, which is not installed: pip install 'saccade[report]'.") from problem
    assets = files("saccade.bench.report") / "assets"
    # The policy allows exactly these hashed scripts to run.
    scripts = {name: Markup((assets / f"{name}.js").read_text("utf-8")) for name in ("watch", "view")}
    page = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        (assets / "page.html.j2").read_text("utf-8")
    )
    sections = [_section(content, index, prompts) for index, content in enumerate(contents)]
    names = [content.name for content in contents]
    text: str = page.render(
        title="Benchmark: " + (names[0] if len(names) == 1 else f"{len(names)} runs"),
        subtitle=", ".join(sorted({content.run.header.started[:10] for content in contents})),
        css=Markup((assets / "page.css").read_text("utf-8")),
        script_hashes=" ".join(_hash(script) for script in scripts.values()),
        marks=traces.MEANINGS,
        overview=tables.overview(contents) if len(contents) > 1 else None,
        sections=sections,
        **scripts,
    )
    return text


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _section(content: Content, index: int, prompts: int) -> dict[str, Any]:
    """Template values of one run."""
    header, everything = content.run.header, content.groups[0]
    shown = traces.prompts(content.run, prompts)
    results = everything.results
    picked = next((m for m in results if m != BASELINE), BASELINE)
    data = [
        tables.depths(everything),
        tables.stages(everything),
        tables.predicted(content.run),
        tables.persistence(content.run),
        tables.view_weights(content.run),
        tables.step_times(content.run),
    ]
    return {
        "id": f"run-{index}",
        "name": content.name,
        "headline": headline(content.run),
        "cautions": list(cautions(content.run)),
        "notes": _notes(content),
        "lossy": [m for m, r in results.items() if not r.lossless],
        "unequal": _unequal(content),
        "problems": [problem.replace(f"{content.run.folder}/", "") for problem in content.problems],
        "tables": [tables.comparison(group) for group in content.groups],
        "scores": tables.scores(everything),
        "plots": [*figures.draw(everything, f"run{index}"), *drawn_signals(content.run, f"run{index}")],
        "data": [table for table in data if table is not None],
        "prompts": shown,
        "marks": {mark for prompt in shown for answer in prompt.answers for mark in answer.marks},
        "methods": [{"name": m, "lossy": not r.lossless, "chosen": m == picked} for m, r in results.items()],
        "commands": commands(header, everything.results),
        "environment": _facts(header.environment),
        "models": _facts(header.models),
        "config": json.dumps(header.config, indent=2, ensure_ascii=False),
    }


def _notes(content: Content) -> list[str]:
    config = content.run.header.config
    texts = [config.get("title"), *sentences(content.run), config.get("note")]
    if config.get("mirrors"):
        texts.append(f"Mirrors {config['mirrors']}.")
    missing = config.get("missing")
    if isinstance(missing, list) and missing:
        texts.append("Left out: " + " ".join(map(str, missing)))
    return [*(str(text) for text in texts if text), *warned(content.run.records)]


def _unequal(content: Content) -> list[str]:
    """Lossless methods with tokens that differ from plain decoding's, and the first such token."""
    found = []
    for method, result in content.groups[0].results.items():
        first = next((r for r in content.run.records if r.method == method and r.equal is False), None)
        if not result.lossless or first is None:
            continue
        text = f"{method}: {result.compared - result.equal} of {result.compared} answers"
        what = first.difference or {}
        if {"position", "ours", "plain"} <= what.keys():
            text += f", first on {first.prompt_id} at position {what['position']}"
            text += f": {what['ours']} instead of {what['plain']}"
        if isinstance(what.get("logits"), dict):
            text += f" with logits {what['logits'].get('ours')} and {what['logits'].get('plain')}"
        found.append(text)
    return found


def _facts(content: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    """Flatten nested settings to pairs, without unknown ones."""
    found: list[tuple[str, str]] = []
    for name, value in content.items():
        if isinstance(value, Mapping):
            found += _facts(value, f"{above}{name} ")
        elif value is not None:
            shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
            found.append((f"{above}{name}", shown))
    return found
