"""`saccade datasets`: data sets that `saccade bench`, `distill` and `batch` know by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from saccade.cli import completion, screen
from saccade.cli import data_options as of
from saccade.cli.option_groups import spread
from saccade.errors import InputError
from saccade.wording import count as counted

if TYPE_CHECKING:
    from saccade.data.catalogue import DataSet


@spread
def datasets(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", autocompletion=completion.datasets, help="Show how the rows of this one become questions."
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write",
            metavar="FOLDER",
            help="Load its questions and write them as `FOLDER/prompts.jsonl` with their media, for `saccade distill` "
            "and `saccade batch`.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Write only the first so many questions.")] = None,
    *,
    reading: of.RowOptions,
) -> None:
    """List data sets that are known by name, and the papers that use them; nothing is downloaded without `--write`.

    `NAME@PAPER` is a data set with what that paper says of its own use: prompt, number of questions, frames, longest
    answer.

    Examples:

    `saccade datasets textvqa@hivis`

    `saccade datasets textvqa --split train --limit 5000 --write textvqa`
    """
    from saccade.data import catalogue

    if name is None and (write is not None or reading.changes()):
        raise InputError("No data set is named; give one, such as `saccade datasets textvqa`.")
    if name is not None:
        if write is not None:
            _write(reading.data(name), write, limit)
        else:
            _show(name, reading.data(name))
        return
    for known in catalogue.names():
        data = catalogue.find(known)
        papers = ", ".join(f"{catalogue.PAPERS[word]} (@{word})" for word in data.papers) or "no paper"
        screen.out().print(f"[bold]{known}[/bold]  {papers}: {data.title}", soft_wrap=True)
    _line("Columns are as evaluation code of August 2026 reads them; `saccade datasets NAME` shows those of one.")


def _write(data: DataSet, folder: Path, limit: int | None) -> None:
    from saccade.data import reading

    with screen.waiting(f"Reading {data.path}"):
        count = reading.write(data, folder, limit)
    _line(f"{counted(count, 'question')} in {folder / reading.FILE}.")


def _show(name: str, data: DataSet) -> None:
    from saccade.data import catalogue

    subset = f", subset {data.subset}" if data.subset else ""
    lines = [
        f"{name}: {data.title or 'no ready mapping'}",
        f"Rows: {data.path}{subset}, split {data.split}",
        *(f"Only rows with {column} = {value}" for column, value in data.where.items()),
        f"Prompt: {data.prompt!r}",
        *([f"Prompt without choices: {data.open_prompt!r}"] if data.open_prompt else []),
    ]
    columns = {
        "question": data.question if any("{question}" in text for text in data.places) else None,
        "images": " + ".join(data.images),
        "videos": " + ".join(data.videos),
        "choices": " + ".join(data.choices),
        "reference": data.reference,
        "id": data.id,
        "category": data.category,
        "turns": data.turns,
    }
    lines.append("Columns: " + ", ".join(f"{part}={column}" for part, column in columns.items() if column))
    if data.join:
        lines.append(f"Joined: {data.join['subset']}, whose {data.join['key']} is the row's {data.join['column']}")
    lines.append(f"Scorer: {data.scorer or 'none; use a judge'}")
    sizes = {
        "questions": data.count,
        "order of seed": data.shuffle,
        "longest answer": data.max_new_tokens,
        "frames": data.num_frames,
    }
    lines += [f"{label.capitalize()}: {value}" for label, value in sizes.items() if value is not None]
    for paper in data.papers:
        changes = ", ".join(f"{key} {value!r}" for key, value in catalogue.changes_of(data, paper).items())
        note = catalogue.note_of(data, paper)
        lines.append(f"{data.name}@{paper} ({catalogue.PAPERS[paper]}): " + "; ".join(p for p in (changes, note) if p))
    if data.source:
        lines.append(f"Columns as read by: {data.source}; not compared with the hub")
    for line in lines:
        _line(line)


def _line(text: str) -> None:
    screen.out().print(text, markup=False, soft_wrap=True)
