"""Options of commands that take data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli import completion
from saccade.errors import InputError

if TYPE_CHECKING:
    from saccade.bench.suites import TaskEntry
    from saccade.data.catalogue import DataSet

_PANEL = "Data sets"

Subset = Annotated[
    str | None, typer.Option("--subset", metavar="NAME", help="Subset (configuration) of it.", rich_help_panel=_PANEL)
]
Split = Annotated[str | None, typer.Option("--split", metavar="NAME", help="Split of it.", rich_help_panel=_PANEL)]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--columns",
        metavar="PART=COLUMN",
        help="Column of a part: question, images, videos, choices, reference, id, category, turns; `+` joins several. "
        "May be repeated.",
        rich_help_panel=_PANEL,
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        "--template",
        metavar="TEXT",
        help="Prompt with the fields of a row, such as `<image> {question}`; `<image>` and `<video>` mark places.",
        rich_help_panel=_PANEL,
    ),
]
System = Annotated[str | None, typer.Option("--system", help="System message.", rich_help_panel=_PANEL)]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where", metavar="COLUMN=VALUE", help="Only rows with this value. May be repeated.", rich_help_panel=_PANEL
    ),
]
Shuffle = Annotated[
    int | None,
    typer.Option(
        "--shuffle",
        metavar="SEED",
        help="Draw the rows at random, which loads the whole split; without it the first ones are streamed.",
        rich_help_panel=_PANEL,
    ),
]
MediaRoot = Annotated[
    str | None,
    typer.Option(
        "--media-root", metavar="FOLDER", help="Folder of the images and videos that rows name.", rich_help_panel=_PANEL
    ),
]
NumFrames = Annotated[
    int | None,
    typer.Option(help="Frames sampled from a video; by default the checkpoint's.", rich_help_panel=_PANEL),
]
Fps = Annotated[
    float | None, typer.Option(help="Frames per second sampled from a video, likewise.", rich_help_panel=_PANEL)
]
Datasets = Annotated[
    list[str] | None,
    typer.Option(
        "--dataset",
        metavar="NAME",
        autocompletion=completion.datasets,
        help="Use the questions of a data set instead: a name of `saccade datasets`, a hub id, or a folder or file "
        "(Parquet, JSON, CSV). May be repeated.",
        rich_help_panel=_PANEL,
    ),
]


@dataclass(frozen=True)
class RowOptions:
    """Rows of a data set, and how they become questions; None where an option is not given."""

    subset: Subset = None
    split: Split = None
    columns: Columns = None
    template: Template = None
    system: System = None
    where: Where = None
    shuffle: Shuffle = None
    media_root: MediaRoot = None

    def changes(self) -> dict[str, Any]:
        """Fields of a `saccade.data.catalogue.DataSet` in place of its own, ``columns`` among them."""
        found = {
            "subset": self.subset,
            "split": self.split,
            "columns": _pairs(self.columns, "--columns", "PART=COLUMN"),
            "prompt": self.template,
            "system": self.system,
            "where": _pairs(self.where, "--where", "COLUMN=VALUE"),
            "shuffle": self.shuffle,
            "media": self.media_root,
        }
        return {name: value for name, value in found.items() if value not in (None, {})}

    def data(self, name: str) -> DataSet:
        """Return the data set of a name, with these changes."""
        from saccade.data import catalogue

        changes = self.changes()
        columns = changes.pop("columns", {})
        data = catalogue.find(name)
        data = data.without_frames() if {"num_frames", "fps"} & set(changes) else data
        return data.with_columns(columns).with_(**changes)


@dataclass(frozen=True)
class DataOptions(RowOptions):
    """Rows and frames, and in ``extra`` other options by name that belong to the questions."""

    num_frames: NumFrames = None
    fps: Fps = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def changes(self) -> dict[str, Any]:
        frames = {"num_frames": self.num_frames, "fps": self.fps}
        return {**super().changes(), **{name: value for name, value in frames.items() if value is not None}}


def _pairs(given: Sequence[str] | None, option: str, form: str) -> dict[str, str]:
    found = {}
    for pair in given or []:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InputError(f"{option} takes {form}, not {pair!r}.")
        found[name] = value
    return found


def tasks_of(
    tasks: Sequence[TaskEntry], datasets: Sequence[str], reading: DataOptions, sizes: Mapping[str, Any]
) -> tuple[TaskEntry, ...]:
    """Return the data sets that the command line names, or else the tasks, with the options in place of their own."""
    from saccade.bench import scorers
    from saccade.bench.suites import TaskEntry

    changes, scorer = reading.changes(), reading.extra.get("--scorer")
    if scorer is not None:
        scorers.check(scorer)
        changes["scorer"] = scorer
    if len(set(datasets)) < len(datasets):
        raise InputError("A data set is named twice; name each once.")
    chosen = [TaskEntry(name=_name(name), dataset=name) for name in datasets] or list(tasks)
    if changes and all(entry.task is not None for entry in chosen):
        raise InputError("Options of data sets and scorers need --dataset or --data; name one.")
    return tuple(_with(entry, changes, sizes, reading) for entry in chosen)


def _with(entry: TaskEntry, changes: Mapping[str, Any], sizes: Mapping[str, Any], reading: DataOptions) -> TaskEntry:
    longest = {} if entry.max_new_tokens is None else {"max_new_tokens": "max_new_tokens"}
    if entry.task is not None:
        changes, own = {}, longest
    elif entry.dataset is not None:
        reading.data(entry.dataset)  # what is wrong shows before models are loaded
        own = {"count": "per_task", "turns": "turns", "max_new_tokens": "max_new_tokens"}
    else:
        odd = sorted({"columns", "prompt", "where", "shuffle", "subset", "split"} & set(changes))
        if odd:
            word = "template" if odd[0] == "prompt" else odd[0]
            raise InputError(f"--{word} is for --dataset; the prompts of --data are complete.")
        own = {"turns": "turns", **longest}
    given = {field: sizes[size] for field, size in own.items() if size in sizes}
    return replace(entry, **changes, **given)


def _name(dataset: str) -> str:
    """Name of a data set in reports: as given, or of its file or folder."""
    return Path(dataset).stem if Path(dataset).expanduser().exists() else dataset.rpartition("/")[2]
