"""An answer as it comes: chunks of text and tokens, then the outputs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from saccade.engine import Request, Run
from saccade.output import Mark, Output, TreeTrace
from saccade.text import Detokenizer, text_of


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step added.

    Attributes:
        text: completed characters of the first row.
        tokens: per row.
        marks: per row, how each token came to be.
        trees: per row the tree that was verified; empty unless traced.
    """

    text: str
    tokens: tuple[tuple[int, ...], ...]
    marks: tuple[tuple[Mark, ...], ...]
    trees: tuple[TreeTrace | None, ...] = ()


class Stream:
    """An answer under way; stop iterating whenever you like, `outputs` holds what there is."""

    def __init__(
        self,
        run: Run,
        tokenizer: Any,
        is_batch: bool,
        streamer: Any,
        requests: Sequence[Request],
    ) -> None:
        self.is_batch = is_batch
        self._run = run
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer)
        self._streamer = streamer
        self._requests = requests

    def __iter__(self) -> Generator[Chunk, None, None]:
        if self._streamer is not None:
            self._streamer.put(torch.tensor([self._requests[0].prompt.ids]))
        try:
            for step in self._run.steps:
                piece = self._text.add(step.tokens[0]) + (self._text.finish() if step.finished[0] else "")
                if self._streamer is not None:
                    for token in step.tokens[0]:
                        self._streamer.put(torch.tensor([token]))
                yield Chunk(piece, step.tokens, step.marks, step.trees)
        finally:
            if self._streamer is not None:
                self._streamer.end()  # whoever reads it in another thread must not wait for ever

    def cancel(self) -> None:
        """End the answer; what there is stays."""
        self._run.cancel()

    @property
    def outputs(self) -> list[Output]:
        """One output per row, complete up to the last step taken."""
        outputs = self._run.outputs
        for output in outputs:
            output.text = text_of(self._tokenizer, output.tokens)
        return outputs

    @property
    def output(self) -> Output:
        """The first row's output."""
        return self.outputs[0]
