"""Forms of items: rows of the batch from an item, and its record from the ended rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from saccade.engine import Request, Row
from saccade.engine.generation import RowPlan, plan
from saccade.inputs.media import load_image
from saccade.inputs.processor import RowInput
from saccade.jobs.items import Item
from saccade.jobs.job import BatchJob, key_of
from saccade.text import text_of
from saccade.vlm import VLM


@dataclass(frozen=True, slots=True)
class PreparedItem:
    """An item that is ready for the batch."""

    starts: Callable[[], list[tuple[Request, RowPlan, bool]]]
    """Makes requests, options, and whether they sample, of its rows; called again where they must run again."""
    record: Callable[[Sequence[Row]], dict[str, Any]]  # of its ended rows


class ItemForm(Protocol):
    """Form of some items and of their records."""

    def prepare(self, item: Item) -> PreparedItem:
        """Read media and tokenize, in a worker thread."""
        ...

    def failure(self, item: Item, sentence: str) -> dict[str, Any]:
        """Record of an item that cannot be answered."""
        ...


@dataclass(frozen=True)
class PlainForm:
    """Pictures, simple rows and conversations; a record has the text and how it was generated."""

    vlm: VLM  # with the method
    job: BatchJob

    def prepare(self, item: Item) -> PreparedItem:
        """See `ItemForm`."""
        prompt, reading, processor = self.job.prompts.of(item).read(), self.job.reading, self.vlm.processor
        question = prompt.question
        if not isinstance(question, str):
            question = processor.load_media(question, reading)
        images = [load_image(source, reading.limits) for source in prompt.images]
        videos = [processor.load_video(source, reading) for source in prompt.videos]
        request = self.vlm.request(RowInput(question, images, videos, reading), seed_of(self.job.seed, item.id))

        def starts() -> list[tuple[Request, RowPlan, bool]]:
            options = self.job.options
            decoding = plan(self.vlm.target, [request.prompt], tokenizer=processor.tokenizer, **options)
            return [(request, decoding.rows[0], decoding.do_sample)]

        def record(rows: Sequence[Row]) -> dict[str, Any]:
            output = rows[0].finish(self.vlm.lossless)
            return {
                "id": item.id,
                **_files(item),
                "text": text_of(processor.tokenizer, output.tokens),
                "finish_reason": output.finish_reason,
                "prompt_tokens": output.stats.prompt_tokens,
                "completion_tokens": len(output.tokens),
                "method": self.vlm.method,
                "lossless": output.lossless,
                **({"seed": rows[0].request.seed} if rows[0].do_sample else {}),
            }

        return PreparedItem(starts, record)

    def failure(self, item: Item, sentence: str) -> dict[str, Any]:
        """See `ItemForm`."""
        return {"id": item.id, **_files(item), "error": sentence}


def _files(item: Item) -> dict[str, Any]:
    return {"files": item.row["files"]} if item.media and "files" in item.row else {}


def seed_of(seed: int, name: str) -> int:
    """Seed of an item's random generator: a function of its id, equal in every attempt and shard."""
    return key_of(str(seed), "draws", name) >> 1
