"""Report as one self-contained HTML file, with every answer token by token: no network, fonts or further files."""

from __future__ import annotations

import io
import json
import shlex
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from saccade.bench.compare import cautions, headline
from saccade.bench.metrics import block_efficiency
from saccade.bench.records import MEDIA, Record, RecordedRun, difference_of, first_difference, warned
from saccade.bench.report import figures, tables
from saccade.bench.report.tables import Content
from saccade.bench.suites import BASELINE
from saccade.errors import SaccadeError
from saccade.options import FORMATS

LARGEST = 640  # longest side, in pixels, of a picture in the report; larger ones are scaled down


def render(contents: Sequence[Content], prompts: int = 4) -> str:
    """Render the page."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as problem:
        raise SaccadeError("Reports need Jinja, which is missing: pip install 'saccade[report]'.") from problem
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
        script_hashes=" ".join(f"'sha256-{b64encode(sha256(s.encode()).digest()).decode()}'" for s in scripts.values()),
        marks=MEANINGS,
        overview=tables.overview(contents) if len(contents) > 1 else None,
        sections=sections,
        **scripts,
    )
    return text


def _section(content: Content, index: int, prompts: int) -> dict[str, Any]:
    """Template values of one run."""
    header = content.run.header
    everything = content.groups[0]
    shown = shown_prompts(content.run, prompts)
    results = everything.results
    picked = next((m for m in results if m != BASELINE), BASELINE)
    data = [tables.depths(everything), tables.stages(everything)]
    return {
        "id": f"run-{index}",
        "name": content.name,
        "headline": headline(content.run),
        "cautions": list(cautions(content.run)),
        "notes": _notes(content),
        "lossy": [m for m, r in results.items() if not r.lossless],
        "unequal": _unequal(content),
        "problems": [problem.replace(f"{content.run.folder}/", "") for problem in content.run.problems],
        "tables": [tables.comparison(group) for group in content.groups],
        "scores": tables.scores(everything),
        "plots": figures.draw(everything, f"run{index}"),
        "data": [table for table in data if table is not None],
        "prompts": shown,
        "marks": {mark for prompt in shown for answer in prompt.answers for mark in answer.marks},
        "methods": [{"name": m, "lossy": not r.lossless, "chosen": m == picked} for m, r in results.items()],
        "commands": "\n".join(
            filter(None, (header.places.get("command"), f"saccade report {shlex.quote(_place(content.run.folder))}"))
        ),
        "environment": _facts(header.environment),
        "models": _facts(header.models),
        "config": json.dumps(header.config, indent=2, ensure_ascii=False),
    }


def _place(folder: Path) -> str:
    """A folder as seen from the current one; its name alone elsewhere, as pages are passed on."""
    whole, here = folder.absolute(), Path.cwd()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else folder.name


def _notes(content: Content) -> list[str]:
    config = content.run.header.config
    texts = [config.get("title"), config.get("note")]
    if config.get("mirrors"):
        texts.append(f"Mirrors {config['mirrors']}.")
    if isinstance(config.get("missing"), list) and config["missing"]:
        texts.append("Left out: " + " ".join(map(str, config["missing"])))
    return [*(str(text) for text in texts if text), *warned(content.run.records)]


def _unequal(content: Content) -> list[str]:
    """Lossless methods with tokens that differ from plain decoding's, and the first such token."""
    texts = []
    for method, result in content.groups[0].results.items():
        first = next((r for r in content.run.records if r.method == method and r.equal is False), None)
        if not result.lossless or first is None:
            continue
        text = f"{method}: {result.compared - result.equal} of {result.compared} answers"
        if first.difference is not None:
            text += f", first on {first.prompt_id} at {difference_of(first)}"
        texts.append(text)
    return texts


def _facts(content: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    """Flatten nested settings to pairs, without unknown ones."""
    facts: list[tuple[str, str]] = []
    for name, value in content.items():
        if isinstance(value, Mapping):
            facts += _facts(value, f"{above}{name} ")
        elif value is not None:
            shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
            facts.append((f"{above}{name}", shown))
    return facts


@dataclass(frozen=True, slots=True)
class EmbeddedPicture:
    """A picture in the page, or the ``problem`` that prevents it."""

    name: str
    uri: str = ""
    width: int = 0
    height: int = 0
    problem: str = ""


def embed(folder: Path, name: str) -> EmbeddedPicture:
    """Read the file ``name`` of a run's ``media/`` folder as a PNG or JPEG data URI.

    A file that is missing, is no picture or lies outside the folder yields a `EmbeddedPicture` with a ``problem``.
    """
    from PIL import Image, UnidentifiedImageError

    root = (folder / MEDIA).resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        return EmbeddedPicture(name, problem="lies outside the run's media folder")
    try:
        with Image.open(path, formats=FORMATS) as image:
            image.thumbnail((LARGEST, LARGEST))
            picture = image.convert("RGBA" if image.has_transparency_data else "RGB")
    except FileNotFoundError:
        return EmbeddedPicture(name, problem="is not in the run's media folder")
    except UnidentifiedImageError:
        return EmbeddedPicture(name, problem="is no picture, so the report cannot show it")
    except (OSError, ValueError, Image.DecompressionBombError) as problem:
        return EmbeddedPicture(name, problem=f"cannot be read ({type(problem).__name__})")
    small, kind = io.BytesIO(), "png"
    picture.save(small, "PNG", optimize=True)
    if picture.mode == "RGB" and small.tell() > 60_000:  # a photograph: PNG would be several times larger
        small, kind = io.BytesIO(), "jpeg"
        picture.save(small, "JPEG", quality=80, optimize=True)
    data = b64encode(small.getvalue()).decode("ascii")
    return EmbeddedPicture(name, f"data:image/{kind};base64,{data}", picture.width, picture.height)


MEANINGS = {
    "target": "the target's own",
    "draft": "drafted and accepted",
    "loose": "loosened: drafted, accepted in place of the target's own token",
    "shifted": "shifted: drafted, accepted because the target's token occurs nearby in the draft",
    "other": "another mark (point at the token to read it)",
}
"""Meaning of the marks of `saccade.bench.records.Record`."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token of an answer."""

    text: str  # as displayed, with visible line breaks
    mark: str  # as recorded
    kind: str  # the mark if it is one of `MEANINGS`, else `other`
    step: int  # number of the step that emitted it; 0 without a tree


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """A method's answer to a prompt."""

    record: Record
    tokens: list[ShownToken]
    marks: list[str]  # kinds that occur, in the order of `MEANINGS`
    steps: list[dict[str, Any]]  # for the script: tree and accepted path of every step
    summary: str  # length and time
    difference: str  # first difference from plain decoding's answer; empty if equal


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """A question with its media as data URIs and the methods' answers."""

    prompt_id: str
    task: str
    question: str
    media: list[EmbeddedPicture]
    answers: list[ShownAnswer]


def shown_prompts(run: RecordedRun, count: int) -> list[ShownPrompt]:
    """Return the first ``count`` traced prompts, or of all prompts when none was traced."""
    traced = dict.fromkeys(r.prompt_id for r in run.records if r.trees)
    prompts = []
    for prompt_id in list(traced or dict.fromkeys(r.prompt_id for r in run.records))[:count]:
        chosen: dict[str, Record] = {}
        for record in (r for r in run.records if r.prompt_id == prompt_id):
            known = chosen.get(record.method)
            if known is None or (record.trees and not known.trees):
                chosen[record.method] = record
        first = next(iter(chosen.values()))
        plain = chosen.get(BASELINE)
        media = [embed(run.folder, name) for name in first.media]
        answers = [_answer(record, plain) for record in chosen.values()]
        prompts.append(ShownPrompt(prompt_id, first.task, first.question, media, answers))
    return prompts


def _answer(record: Record, plain: Record | None) -> ShownAnswer:
    steps: list[dict[str, Any]] = []
    numbers = [0] * len(record.tokens)
    for tree in record.trees:
        start = tree["start"]
        end = min(start + len(tree["path"]), len(record.tokens))
        numbers[start:end] = [len(steps) + 1] * (end - start)
        steps.append(_step(tree, record, start, end))
    tokens = [
        ShownToken(_visible(piece), mark, mark if mark in MEANINGS else "other", step)
        for piece, mark, step in zip(record.pieces, record.marks, numbers, strict=True)
    ]
    seen = {token.kind for token in tokens}
    marks = [mark for mark in MEANINGS if mark in seen]
    efficiency = block_efficiency(record)
    seconds = record.stats["seconds"]["total"]
    per_pass = "" if efficiency is None else f", {efficiency:.2f} per target pass"
    summary = f"{len(record.tokens)} tokens in {seconds:.3g} s{per_pass}; ended by {record.finish_reason}"
    difference = ""
    first = None if plain is None else first_difference(record.tokens, plain.tokens)
    if plain is not None and first is not None:
        difference = f"Leaves plain decoding's answer at position {first}"
        if first == min(len(record.tokens), len(plain.tokens)):
            difference += ", where one of them ends."
        else:
            difference += f": {record.pieces[first]!r} instead of {plain.pieces[first]!r}."
    return ShownAnswer(record, tokens, marks, steps, summary, difference)


def _step(tree: dict[str, Any], record: Record, start: int, end: int) -> dict[str, Any]:
    """Data for the page's script: node texts, parents, accepted path, marks of the path and the token after it."""
    path = tree["path"]
    kinds = [m if m in MEANINGS else "other" for m in record.marks[start:end]]
    bonus = None
    if start < end == start + len(path):  # otherwise the answer ended on a draft token, so no bonus token follows
        bonus = _visible(record.pieces[end - 1])
    return {
        "start": start,
        "nodes": [_visible(piece) for piece in tree["pieces"]],
        "parents": tree["parents"],
        "path": path,
        "kinds": kinds,
        "bonus": bonus,
    }


def _visible(piece: str) -> str:
    """Show line breaks as signs, and an incomplete character as a dot."""
    return piece.replace("\n", "↵\n") or "·"
