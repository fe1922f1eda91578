"""`saccade datasets`: data sets that `saccade bench`, `distill` and `batch` know by name, and options to read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
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
        None, "Column of a part, such as `question=q`; `+` joins several. May be repeated.", metavar="PART=COLUMN"
    )
    template: str | None = option(None, "Prompt with fields of a row, such as `<image> {question}`.", metavar="TEXT")
    system: str | None = option(None, "System message.", metavar="TEXT")
    where: list[str] | None = option(None, "Only rows with this value. May be repeated.", metavar="COLUMN=VALUE")
    shuffle: int | None = option(None, "Draw rows at random, which loads the whole split.", metavar="SEED")
    media_root: str | None = option(None, "Folder of the images and videos that rows name.", metavar="FOLDER")

    def changes(self) -> dict[str, Any]:
        """Fields of a `saccade.data.catalogue.DataSet` in place of its own, ``columns`` among them."""
        values = asdict(self)
        values["prompt"], values["media"] = values.pop("template"), values.pop("media_root")
        values["columns"] = split_pairs(self.columns, "--columns", "PART=COLUMN,")
        values["where"] = split_pairs(self.where, "--where", "COLUMN=VALUE,")
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
        autocompletion=completion.BY_NAME["dataset"],
        help="Show how the rows of this one become questions.",
    ),
    write: Path | None = option(
        None, "Load its questions, and write `FOLDER/prompts.jsonl` with their media.", metavar="FOLDER"
    ),
    limit: int | None = option(None, "Write only the first so many questions."),
    *,
    reading: RowOptions,
) -> None:
    """List data sets that are known by name, and the papers that use them; nothing is downloaded without `--write`.

    `NAME@PAPER` is a data set with what that paper says of its own use: prompt, number of questions, frames, longest
    answer.

    Examples:

    - `saccade datasets textvqa@hivis`
    - `saccade datasets textvqa --split train --limit 5000 --write textvqa`
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
        screen.show(f"{known}  {papers}: {data.title}")
    screen.show("Columns are as evaluation code of August 2026 reads them; `saccade datasets NAME` shows those of one.")


def _describe(name: str, data: DataSet) -> None:
    from saccade.data import catalogue

    screen.show(f"{name}: {data.title or 'no ready mapping'}")
    for field, value in asdict(data).items():
        if field not in ("name", "title", "papers", "source") and value not in (None, "", (), {}):
            screen.show(f"  {field}: {' + '.join(value) if isinstance(value, tuple) else value}")
    if data.source:
        screen.show(f"  source: columns are as read by {data.source}; not compared with the hub")
    for paper in data.papers:
        changes = ", ".join(f"{key} {value!r}" for key, value in catalogue.changes_of(data, paper).items())
        parts = [part for part in (changes, data.papers[paper].get("note")) if part]
        screen.show(f"{data.name}@{paper} ({catalogue.PAPERS[paper]}): {'; '.join(parts)}")
