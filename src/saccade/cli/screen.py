"""Terminal output of the commands: notes, progress, marked tokens, a summary."""

from __future__ import annotations

import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from saccade.errors import SaccadeWarning
from saccade.wording import duration

if TYPE_CHECKING:
    from saccade.chat import Turn
    from saccade.model_spec import ModelSpec
    from saccade.output import Chunk, Mark, Output
    from saccade.stream import Stream
    from saccade.vlm import VLM

notes = Console(stderr=True, highlight=False)


def out() -> Console:
    """Return the console of standard output, whose lines have any length where it is no terminal."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 10_000)


def show(*lines: str) -> None:
    """Print lines on stdout."""
    for line in lines:
        print(line)


def facts(title: str, values: Mapping[str, object]) -> None:
    """Print a title and lines of a name and a value each on stdout."""
    width = max(map(len, values), default=0)
    show(title, *(f"  {name:<{width}}  {worded(value)}" for name, value in values.items()))


def worded(value: object) -> str:
    """A value for a person."""
    match value:
        case dict():
            return ", ".join(f"{name} {worded(part)}".rstrip() for name, part in value.items()) or "none"
        case list():
            return ", ".join(map(str, value))
        case float():
            return f"{value:.3g}"
        case None | True | False:
            return {None: "none", True: "yes", False: "no"}[value]
    return str(value)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on stdout."""
    from rich.table import Table

    drawn = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        drawn.add_row(*(Text(str(cell), no_wrap=True) for cell in row))
    out().print(drawn)


def note(words: str, style: str = "dim") -> None:
    """Print a note on stderr, beside the answer on stdout."""
    notes.print(words, style=style, markup=False, soft_wrap=True)


def warn(*sentences: str) -> None:
    """Print warnings on stderr, each as one line."""
    for sentence in sentences:
        note(f"saccade: {sentence}", "yellow")


def waiting(what: str) -> AbstractContextManager[object]:
    """Show a spinner on stderr; nothing where stderr is not a terminal."""
    return notes.status(what) if notes.is_terminal else nullcontext()


LOG_SECONDS = 60.0  # between the lines that stand for a bar where stderr is no terminal


@contextmanager
def progress(what: str, place: Path | None = None, live: bool = True) -> Iterator[Callable[..., None]]:
    """Show a bar with the time left on stderr; a line once a minute where that is no terminal.

    Yields its update of (done, total, words). After Ctrl-C, the place of finished answers is printed. Without ``live``
    nothing is drawn between updates.
    """
    from rich.progress import Progress, TextColumn

    is_shown = notes.is_terminal
    columns = (*Progress.get_default_columns()[1:], TextColumn("{task.description}", markup=False))
    bar = Progress(*columns, console=notes, auto_refresh=live, transient=True, speed_estimate_period=600)
    task = bar.add_task(what, total=None)
    last = time.monotonic()

    def update(done: int, total: int, text: str = what) -> None:
        nonlocal last
        text = f"{done} of {total}, {text}"
        bar.update(task, completed=done, total=total, description=text, refresh=is_shown and not live)
        left = bar.tasks[0].time_remaining
        if not is_shown and left is not None and time.monotonic() - last >= LOG_SECONDS:
            last = time.monotonic()
            note(f"{text}, about {duration(left)} left")

    try:
        with bar if is_shown else nullcontext():
            yield update
    except KeyboardInterrupt:
        if place is not None:
            note(f"Stopped. The answers so far are in {place}; the same command resumes the run.")
        raise


def check_media(image: Sequence[str] = (), video: Sequence[str] = ()) -> None:
    """Check files before models are loaded for them."""
    from saccade.inputs.media import load_image, read_source

    for file in image:
        load_image(file)
    for file in video:
        read_source(file, "video")


def check_models(models: ModelSpec, complete: bool = True) -> None:
    """Report every mistake that shows before weights are read; ``complete``: whether these have to be there."""
    from saccade.vlm import check

    quiet_libraries()
    check(models, complete)


def load_models(models: ModelSpec) -> VLM:
    """Load models after a spinner; of warnings, only Saccade's are shown."""
    if not sys.warnoptions:
        _shown.clear()
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", SaccadeWarning)
        warnings.showwarning = _show_once  # type: ignore[assignment]
    with waiting("Loading the models"):
        from saccade.vlm import check

        quiet_libraries()
        return check(models)()


def sampled(defaults: Any, options: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """Settings and seed with which answers are sampled; empty for greedy decoding.

    ``defaults``: GenerationConfig of the checkpoint, or the checkpoint.
    """
    from transformers import GenerationConfig

    from saccade.engine.row import sampling_of
    from saccade.inputs.processor import seeds_of

    if isinstance(defaults, str):
        with suppress(OSError):  # a checkpoint without one
            defaults = GenerationConfig.from_pretrained(defaults)
    settings = sampling_of(defaults, options)
    return {**settings, "seed": seeds_of(seed, 1)[0]} if settings else {}


def note_sampling(settings: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Print how answers are sampled, where they are."""
    if settings:
        words = ", ".join(f"{name.replace('_', '-')} {value}" for name, value in settings.items())
        by_default = "do_sample" not in options
        whose = "; so says the checkpoint's generation_config, --temperature 0 is greedy" if by_default else ""
        note(f"Sampling with {words}{whose}.")


def quiet_libraries() -> None:
    """Silence progress bars and warnings of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


_shown = set[tuple[str, int]]()


def _show_once(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
    """Print a warning as one line; a place, not a text, is shown once: texts may count what differs per image."""
    if issubclass(category, SaccadeWarning) and (filename, lineno) not in _shown:
        _shown.add((filename, lineno))
        warn(str(message))


_LOOKS: dict[Mark, tuple[str, str, str]] = {  # colour, and brackets where the terminal has no colours
    "target": ("", "", ""),
    "draft": ("green", "‹", "›"),
    "loose": ("yellow", "«", "»"),
    "shifted": ("yellow", "«", "»"),
}


class Painter:
    """Printer of a streamed answer; ``marked``: drafted tokens are marked by colours, or by brackets without those."""

    def __init__(self, tokenizer: Any, console: Console, marked: bool) -> None:
        from saccade.stream import Detokenizer

        self._text = Detokenizer(tokenizer)
        self._console, self._marked = console, marked
        self._has_colours = bool(console.color_system) and not console.no_color
        self._bracket = ""  # that closes what is open

    def show(self, chunk: Chunk) -> None:
        """Print one chunk (first row)."""
        if not self._marked:
            self._write(chunk.text)
            return
        for token, mark in zip(chunk.tokens[0], chunk.marks[0], strict=True):
            self._put(self._text.add([token]), mark)

    def _put(self, text: str, mark: Mark) -> None:
        colour, opening, closing = _LOOKS[mark]
        if self._has_colours and colour:
            self._console.print(Text(text, style=colour), end="", soft_wrap=True)
            return
        if text and closing != self._bracket and not self._has_colours:
            text = self._bracket + opening + text
            self._bracket = closing
        self._write(text)

    def finish(self) -> None:
        """Print buffered characters, and end the line."""
        if self._marked:
            self._put(self._text.finish(), "target")
        self._write(self._bracket + "\n")

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


def answer(stream: Stream | Turn, painter: Painter | None) -> Output:
    """Generate to the end, printing every chunk if there is a painter, and return the output; Ctrl-C ends it early."""
    with suppress(KeyboardInterrupt), closing(iter(stream)) as chunks:
        with waiting("Reading the prompt"):
            first = next(chunks)
        with _deferred_interrupt() as pressed:
            for chunk in chain([first], chunks):
                if painter is not None:
                    painter.show(chunk)
                if pressed.is_set():
                    break
    if painter is not None:
        painter.finish()
    return stream.output


@contextmanager
def _deferred_interrupt() -> Iterator[Event]:
    """Defer the first Ctrl-C to the end of the step, so that caches stay usable; the second one interrupts at once."""
    pressed = Event()

    def press(*_: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


ENDS = {  # finish reasons in words
    "eos": "complete",
    "stop": "ended by a stop string",
    "length": "cut at the limit",
    "interrupted": "interrupted",
    "visual": "cut before a placeholder of an image",
}
