"""What the commands show while they work: waiting signs, marked tokens, a summary."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from saccade.output import Mark, Output
    from saccade.stream import Chunk
    from saccade.vlm import VLM

note = Console(stderr=True, highlight=False)
"""Everything that is not the answer itself goes here."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on stderr while something takes long; nothing when stderr is no terminal."""
    if note.is_terminal:
        with note.status(what):
            yield
    else:
        yield


def load_models(target: str, drafter: str | None, method: str | None, **options: Any) -> VLM:
    """`saccade.load` with a waiting sign; `pocket` stands for the built-in pair."""
    with waiting(f"Loading {target}"):
        from transformers.utils import logging

        from saccade import load

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        if target == "pocket":
            from saccade import methods, pocket

            target = str(pocket.target_path())
            if drafter is None and (method is None or methods.get(method).needs == "draft model"):
                drafter = str(pocket.draft_path())
        return load(target, drafter, method, **options)


class Painter:
    """Prints an answer as it comes, accepted draft tokens marked.

    In colour, drafted tokens are green; without colour they stand between ‹ and ›.
    """

    def __init__(self, tokenizer: Any, console: Console, marked: bool) -> None:
        from saccade.text import Detokenizer

        self._text = Detokenizer(tokenizer)
        self._console = console
        self._marked = marked
        self._open = False

    def show(self, chunk: Chunk) -> None:
        """Print one chunk (first row)."""
        if not self._marked:
            self._put(chunk.text)
            return
        for token, mark in zip(chunk.tokens[0], chunk.marks[0], strict=True):
            self._piece(self._text.add([token]), mark)

    def finish(self) -> None:
        """Print what was held back, and end the line."""
        if self._marked:
            self._piece(self._text.finish(), "target")
        self._put("\n")

    def _piece(self, text: str, mark: Mark) -> None:
        drafted = mark == "draft"
        if self._console.color_system:
            self._console.print(Text(text, style="green" if drafted else ""), end="", soft_wrap=True)
            return
        if text and drafted != self._open:
            self._put("‹" if drafted else "›")
            self._open = drafted
        self._put(text)

    def _put(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


def answer(stream: Any, painter: Painter) -> Output:
    """Print a stream; Ctrl-C ends it with what there is."""
    chunks = iter(stream)
    try:
        with waiting("Reading the prompt"):
            first = next(chunks)
        painter.show(first)
        for chunk in chunks:
            painter.show(chunk)
    except KeyboardInterrupt:
        pass
    painter.finish()
    output: Output = stream.output
    return output


def summary(output: Output, method: str) -> str:
    """One line of statistics."""
    stats, times = output.stats, output.stats.times
    rate = (stats.new_tokens - 1) / times.decode if times.decode > 0 else 0.0
    parts = [
        f"{stats.new_tokens} tokens in {times.total:.2f} s",
        f"{rate:.0f} tokens/s after prefill",
        f"block efficiency {stats.block_efficiency:.2f}",
        f"method {method}" + ("" if output.lossless else " (lossy)"),
        f"ended by {output.finish_reason}",
    ]
    if stats.reused_tokens:
        parts.insert(1, f"{stats.reused_tokens} of {stats.prompt_tokens} prompt tokens reused")
    return " · ".join(parts)


def out() -> Console:
    """The answer's own console."""
    return Console(file=sys.stdout, highlight=False)
