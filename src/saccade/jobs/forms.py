"""Forms of items: rows of the batch from an item, and its record from the ended rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from saccade.engine import Request, Row
from saccade.engine.generation import RowPlan, plan
from saccade.errors import SaccadeError
from saccade.inputs.conversations import Messages
from saccade.inputs.media import load_image
from saccade.inputs.processor import MediaOptions, RowInput
from saccade.jobs.index import key_of
from saccade.jobs.items import Asking, Item
from saccade.text import text_of
from saccade.vlm import VLM

Start = tuple[Request, RowPlan, bool]
"""Request of a row, its options, and whether it samples."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """An item that is ready for the batch."""

    starts: Callable[[], list[Start]]  # makes the starts of its rows; called again where they must run anew
    record: Callable[[Sequence[Row]], dict[str, Any]]  # of its ended rows


class Form(Protocol):
    """Form of some items and of their records."""

    def prepare(self, item: Item) -> Prepared:
        """Read media and tokenize, in a worker thread."""
        ...

    def failure(self, item: Item, sentence: str) -> dict[str, Any]:
        """Record of an item that cannot be answered."""
        ...


@dataclass(frozen=True)
class OwnForm:
    """Pictures, simple rows and conversations; a record has the text and what is to know about it."""

    vlm: VLM  # with the method
    asking: Asking  # makes questions
    reading: MediaOptions  # of prompts
    seed: int  # from which every item's own seed follows
    options: Mapping[str, Any]  # of the generation

    def prepare(self, item: Item) -> Prepared:
        """See `Form`."""
        ask = self.asking.ask(item).read()
        question: str | Messages = ask.question
        processor = self.vlm.processor
        if not isinstance(question, str):
            question = processor.load_media(question, self.reading)
        images = [load_image(source, self.reading.limits) for source in ask.images]
        videos = [processor.load_video(source, self.reading) for source in ask.videos]
        request = self.vlm.request(RowInput(question, images, videos, self.reading), seed_of(self.seed, item.id))

        def starts() -> list[Start]:
            tokenizer = processor.tokenizer
            decoding = plan(self.vlm.target, [request.prompt], tokenizer=tokenizer, **self.options)
            return [(request, decoding.rows[0], decoding.do_sample)]

        return Prepared(starts, lambda rows: self._record(item, rows[0]))

    def failure(self, item: Item, sentence: str) -> dict[str, Any]:
        """See `Form`."""
        return {"id": item.id, **_files(item), "error": sentence}

    def _record(self, item: Item, row: Row) -> dict[str, Any]:
        output = row.finish(self.vlm.lossless)
        return {
            "id": item.id,
            **_files(item),
            "text": text_of(self.vlm.processor.tokenizer, output.tokens),
            "finish_reason": output.finish_reason,
            "prompt_tokens": output.stats.prompt_tokens,
            "completion_tokens": len(output.tokens),
            "method": self.vlm.method,
            "lossless": output.lossless,
            **({"seed": row.request.seed} if row.do_sample else {}),
        }


def _files(item: Item) -> dict[str, Any]:
    return {"files": item.row["files"]} if item.media and "files" in item.row else {}


def seed_of(seed: int, name: str) -> int:
    """Seed of an item's random generator: a function of its id, equal in every attempt and shard."""
    return key_of(str(seed), "draws", name) >> 1


def sentence_of(error: BaseException) -> str:
    """One sentence about why an item cannot be answered."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError) or "out of memory" in text:
        text = "The memory does not suffice for it; give it smaller media, or run fewer rows at once"
    elif not isinstance(error, SaccadeError):
        text = f"It failed with {type(error).__name__}: {text}"
    return text[0].upper() + text[1:500].rstrip(".") + "."
