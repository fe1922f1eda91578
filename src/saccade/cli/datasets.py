"""`saccade datasets`: data sets that `saccade bench`, `distill` and `batch` know by name, and options to read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from saccade.cli import completion, screen
from saccade.cli.option_groups import group, option, split_pairs, spread
from saccade.errors import InputError
from saccade.wording import count as counted

if TYPE_CHECKING:
    from saccade.bench.suites import TaskEntry
    from saccade.data.catalogue import DataSet


@group("Data sets")
class RowOptions:
    """Rows of a data set, and how they become questions; None where an option is not used."""

    subset: str | None = option(None, "Subset (configuration) of it.", metavar="NAME")
    split: str | None = option(None, "Split of it.", metavar="NAME")
    columns: list[str] | None = option(
        None,
        "Column of a part: question, images, videos, choices, reference, id, category, turns; `+` joins several. May "
        "be repeated.",
        metavar="PART=COLUMN",
    )
    template: str | None = option(
        None,
        "Prompt with the fields of a row, such as `<image> {question}`; `<image>` and `<video>` mark places.",
        metavar="TEXT",
    )
    system: str | None = option(None, "System message.", metavar="TEXT")
    where: list[str] | None = option(None, "Only rows with this value. May be repeated.", metavar="COLUMN=VALUE")
    shuffle: int | None = option(
        None,
        "Draw the rows at random, which loads the whole split; without it the first ones are streamed.",
        metavar="SEED",
    )
    media_root: str | None = option(None, "Folder of the images and videos that rows name.", metavar="FOLDER")

    def changes(self) -> dict[str, Any]:
        """Fields of a `saccade.data.catalogue.DataSet` in place of its own, ``columns`` among them."""
        values = {
            "subset": self.subset,
            "split": self.split,
            "columns": split_pairs(self.columns, "--columns", "PART=COLUMN,"),
            "prompt": self.template,
            "system": self.system,
            "where": split_pairs(self.where, "--where", "COLUMN=VALUE,"),
            "shuffle": self.shuffle,
            "media": self.media_root,
        }
        return {name: value for name, value in values.items() if value not in (None, {})}

    def data(self, name: str) -> DataSet:
        """Return the data set of a name, with these changes."""
        from saccade.data import catalogue

        changes = self.changes()
        columns = changes.pop("columns", {})
        data = catalogue.find(name)
        data = data.without_frames() if {"num_frames", "fps"} & set(changes) else data
        return data.with_columns(columns).with_(**changes)


@group("Data sets")
class DataOptions(RowOptions):
    """Rows and frames of data sets."""

    num_frames: int | None = option(None, "Frames sampled from a video; by default the checkpoint's.")
    fps: float | None = option(None, "Frames per second sampled from a video, likewise.")

    def changes(self) -> dict[str, Any]:
        frames = {"num_frames": self.num_frames, "fps": self.fps}
        return {**super().changes(), **{name: value for name, value in frames.items() if value is not None}}


def tasks_of(
    tasks: Sequence[TaskEntry],
    datasets: Sequence[str],
    reading: DataOptions,
    sizes: Mapping[str, Any],
    scorer: str | None = None,
) -> tuple[TaskEntry, ...]:
    """Return the data sets that the command line names, or else the tasks, with the options in place of their own."""
    from saccade.bench import scorers
    from saccade.bench.suites import TaskEntry

    changes = reading.changes()
    if scorer is not None:
        scorers.check(scorer)
        changes["scorer"] = scorer
    if len(set(datasets)) < len(datasets):
        raise InputError("A data set is named twice; name each once.")
    chosen = [TaskEntry(name=_name(name), dataset=name) for name in datasets] or list(tasks)
    if changes and all(entry.task is not None for entry in chosen):
        raise InputError("Options of data sets and scorers need --dataset or --data; name one.")
    return tuple(_with(entry, changes, sizes, reading) for entry in chosen)


def _name(dataset: str) -> str:
    """Name of a data set in reports: as on the command line, or of its file or folder."""
    return Path(dataset).stem if Path(dataset).expanduser().exists() else dataset.rpartition("/")[2]


def _with(entry: TaskEntry, changes: Mapping[str, Any], sizes: Mapping[str, Any], reading: DataOptions) -> TaskEntry:
    fields = {} if entry.max_new_tokens is None else {"max_new_tokens": "max_new_tokens"}
    if entry.task is not None:
        changes = {}
    elif entry.dataset is not None:
        reading.data(entry.dataset)  # what is wrong shows before models are loaded
        fields = {"count": "per_task", "turns": "turns", "max_new_tokens": "max_new_tokens"}
    else:
        odd = sorted({"columns", "prompt", "where", "shuffle", "subset", "split"} & set(changes))
        if odd:
            word = "template" if odd[0] == "prompt" else odd[0]
            raise InputError(f"--{word} is for --dataset; the prompts of --data are complete.")
        fields["turns"] = "turns"
    return replace(entry, **changes, **{field: sizes[size] for field, size in fields.items() if size in sizes})


@spread
def datasets(
    name: str | None = typer.Argument(
        None,
        metavar="[NAME]",
        autocompletion=completion.datasets,
        help="Show how the rows of this one become questions.",
    ),
    write: Path | None = option(
        None,
        "Load its questions and write them as `FOLDER/prompts.jsonl` with their media, for `saccade distill` and "
        "`saccade batch`.",
        metavar="FOLDER",
    ),
    limit: int | None = option(None, "Write only the first so many questions."),
    *,
    reading: RowOptions,
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
        data = reading.data(name)
        if write is None:
            _describe(name, data)
            return
        from saccade.data import reading as rows

        with screen.waiting(f"Reading {data.path}"):
            count = rows.write(data, write, limit)
        screen.show(f"{counted(count, 'question')} in {write / rows.FILE}.")
        return
    for known in catalogue.names():
        data = catalogue.find(known)
        papers = ", ".join(f"{catalogue.PAPERS[word]} (@{word})" for word in data.papers) or "no paper"
        screen.out().print(f"[bold]{known}[/bold]  {papers}: {data.title}", soft_wrap=True)
    screen.show("Columns are as evaluation code of August 2026 reads them; `saccade datasets NAME` shows those of one.")


def _describe(name: str, data: DataSet) -> None:
    from saccade.data import catalogue

    subset = f", subset {data.subset}" if data.subset else ""
    has_question = any("{question}" in text for text in data.places)
    columns = {
        "question": data.question if has_question else None,
        "images": " + ".join(data.images),
        "videos": " + ".join(data.videos),
        "choices": " + ".join(data.choices),
        "reference": data.reference,
        "id": data.id,
        "category": data.category,
        "turns": data.turns,
    }
    join = data.join and f"{data.join['subset']}, whose {data.join['key']} is the row's {data.join['column']}"
    facts: dict[str, Any] = {
        name: data.title or "no ready mapping",
        "Rows": f"{data.path}{subset}, split {data.split}",
        "Only rows with": ", ".join(f"{column} = {value}" for column, value in data.where.items()),
        "Prompt": repr(data.prompt),
        "Prompt without choices": data.open_prompt and repr(data.open_prompt),
        "Columns": ", ".join(f"{part}={column}" for part, column in columns.items() if column),
        "Joined": join,
        "Scorer": data.scorer or "none; use a judge",
        "Questions": data.count,
        "Order of seed": data.shuffle,
        "Longest answer": data.max_new_tokens,
        "Frames": data.num_frames,
    }
    for paper in data.papers:
        changes = ", ".join(f"{key} {value!r}" for key, value in catalogue.changes_of(data, paper).items())
        note = catalogue.note_of(data, paper)
        facts[f"{data.name}@{paper} ({catalogue.PAPERS[paper]})"] = "; ".join(part for part in (changes, note) if part)
    if data.source:
        facts["Columns as read by"] = f"{data.source}; not compared with the hub"
    screen.show(*(f"{label}: {value}" for label, value in facts.items() if value not in (None, "", {})))
