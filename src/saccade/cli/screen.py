"""Terminal output of the commands: notes, progress, marked tokens, a summary."""

from __future__ import annotations

import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from saccade.errors import InputError, SaccadeWarning
from saccade.wording import count, duration

if TYPE_CHECKING:
    from saccade.chat import Turn
    from saccade.output import Chunk, Mark, Output
    from saccade.stream import Stream
    from saccade.vlm import VLM
_UNCUT = 10_000
_notes = Console(stderr=True, highlight=False)


def out() -> Console:
    """Return the console of standard output, whose lines have any length where it is no terminal."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else _UNCUT)


def show(*lines: str) -> None:
    """Print lines on stdout."""
    for line in lines:
        out().print(line, markup=False, soft_wrap=True)


def note(words: str, style: str = "dim") -> None:
    """Print a note on stderr, beside the answer on stdout."""
    _notes.print(words, style=style, markup=False, soft_wrap=True)


def be_quiet() -> None:
    """Print no notes."""
    _notes.quiet = True


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a spinner on stderr; nothing where stderr is not a terminal."""
    if _notes.is_terminal:
        with _notes.status(what):
            yield
    else:
        yield


LOG_SECONDS = 60.0
"""Time between the lines that stand for a bar where stderr is no terminal."""


@contextmanager
def progress(what: str, stopped: str = "", live: bool = True) -> Iterator[Callable[..., None]]:
    """Show a bar with the time left on stderr; a line once a minute where that is no terminal.

    Yields its update of (done, total, words). After Ctrl-C ``stopped`` is printed. Without ``live`` nothing is drawn
    between updates.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    words = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), words, TimeRemainingColumn())
    period = 600  # seconds of the estimate; one batch can take minutes
    is_shown = _notes.is_terminal
    bar = Progress(*columns, console=_notes, auto_refresh=live, transient=True, speed_estimate_period=period)
    task = bar.add_task(what, total=None)
    last = time.monotonic()

    def update(done: int, total: int, text: str = what) -> None:
        nonlocal last
        bar.update(task, completed=done, total=total, description=text, refresh=is_shown and not live)
        left = bar.tasks[0].time_remaining
        if not is_shown and left is not None and time.monotonic() - last >= LOG_SECONDS:
            last = time.monotonic()
            note(f"{done} of {total}, {text}, about {duration(left)} left")

    try:
        with bar if is_shown else nullcontext():
            yield update
    except KeyboardInterrupt:
        if stopped:
            note(stopped)
        raise


def check_media(images: list[str], videos: list[str]) -> None:
    """Check files before models are loaded for them."""
    from saccade.inputs.media import load_image, read_source

    for image in images:
        load_image(image)
    for video in videos:
        read_source(video, "video")


def load_models(target: str, drafter: str | None, method: str | None, **options: Any) -> VLM:
    """Call `saccade.load` behind a spinner."""
    if not sys.warnoptions:
        _show_own_warnings()
    with waiting(f"Loading {target}"):
        from saccade import load

        quiet_libraries()
        return load(target, drafter, method, **options)


def quiet_libraries() -> None:
    """Silence progress bars and warnings of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _show_own_warnings() -> None:
    """Print each of Saccade's warnings once, as one line; silence those of libraries, which a user cannot act on."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", SaccadeWarning)
    shown: set[tuple[str, int]] = set()
    before = warnings.showwarning

    def show_once(message: Any, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if not issubclass(category, SaccadeWarning):
            before(message, category, filename, lineno, *rest)
        elif (filename, lineno) not in shown:
            shown.add((filename, lineno))  # not the text: it may count things that differ per image
            note(f"saccade: {message}", "yellow")

    warnings.showwarning = show_once  # type: ignore[assignment]


def heads_by_name(heads: list[str]) -> dict[str, str]:
    """Return the folders by name, of FOLDER or NAME=FOLDER each."""
    named: dict[str, str] = {}
    for text in heads:
        name, equals, folder = text.partition("=")
        if not (equals and name and folder) or Path(text).is_dir():
            name, folder = Path(text).expanduser().resolve().name, text
        if name in named:
            raise InputError(f"Two heads are named {name!r}; give one of them another name: --head NAME=FOLDER.")
        named[name] = folder
    return named


_PLAIN, _LOOSE = ("", "", ""), ("yellow", "«", "»")
_LOOKS: dict[Mark, tuple[str, str, str]] = {
    "target": _PLAIN,
    "draft": ("green", "‹", "›"),
    "loose": _LOOSE,
    "shifted": _LOOSE,
}
"""Colour of the tokens of a mark, and the brackets around them where the terminal has no colours."""


class Painter:
    """Printer of a streamed answer; ``marked``: drafted tokens are marked by colours, or by brackets without those."""

    def __init__(self, tokenizer: Any, console: Console, marked: bool) -> None:
        from saccade.stream import Detokenizer

        self._text = Detokenizer(tokenizer)
        self._console, self._marked = console, marked
        self._has_colours = bool(console.color_system) and not console.no_color
        self._look = _PLAIN

    def show(self, chunk: Chunk) -> None:
        """Print one chunk (first row)."""
        if not self._marked:
            self.put(chunk.text, "target")
            return
        for token, mark in zip(chunk.tokens[0], chunk.marks[0], strict=True):
            self.put(self._text.add([token]), mark)

    def put(self, text: str, mark: Mark) -> None:
        """Print a token's text."""
        look = _LOOKS[mark]
        if self._has_colours and look != _PLAIN:
            self._console.print(Text(text, style=look[0]), end="", soft_wrap=True)
            return
        if text and look != self._look and not self._has_colours:
            self._write(self._look[2] + look[1])
            self._look = look
        self._write(text)

    def finish(self) -> None:
        """Print buffered characters, and end the line."""
        if self._marked:
            self.put(self._text.finish(), "target")
        self._write(self._look[2] + "\n")

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


def answer(stream: Stream | Turn, painter: Painter | None) -> Output:
    """Generate to the end, printing every chunk if there is a painter, and return the output; Ctrl-C ends it early."""
    try:
        with closing(iter(stream)) as chunks:
            with waiting("Reading the prompt"):
                first = next(chunks)
            with _stop_between_steps() as stopped:
                for chunk in chain([first], chunks):
                    if painter is not None:
                        painter.show(chunk)
                    if stopped():
                        break
    except KeyboardInterrupt:
        pass
    if painter is not None:
        painter.finish()
    return stream.output


@contextmanager
def _stop_between_steps() -> Iterator[Callable[[], bool]]:
    """Defer the first Ctrl-C to the end of the step, so that caches stay usable; the second one interrupts at once."""
    stopped = False

    def stop(*_: Any) -> None:
        nonlocal stopped
        if stopped:
            raise KeyboardInterrupt
        stopped = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: stopped
    finally:
        signal.signal(signal.SIGINT, before)


ENDS = {
    "eos": "complete",
    "stop": "ended by a stop string",
    "length": "cut at the limit",
    "interrupted": "interrupted",
    "visual": "cut before a placeholder of an image",
}
"""Finish reasons in words."""


def summary(output: Output, method: str) -> str:
    """Return one line of statistics."""
    stats, times = output.stats, output.stats.times
    parts = [f"{count(stats.new_tokens, 'token')} in {times.total:.2f} s"]
    if stats.reused_tokens:
        parts.append(f"{stats.reused_tokens} of {stats.prompt_tokens} prompt tokens reused")
    if stats.target_passes and times.decode > 0:
        parts.append(f"{stats.decoded_tokens / times.decode:.0f} tokens/s after prefill")
        parts.append(f"block efficiency {stats.block_efficiency:.2f}")
    parts.append(f"method {method}" + ("" if output.lossless else " (lossy)"))
    parts.append(ENDS[output.finish_reason])
    return " · ".join(parts)
