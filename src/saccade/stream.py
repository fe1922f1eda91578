"""Generation options, and an answer in progress: chunks of text and tokens, then the outputs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers import GenerationConfig

from saccade.engine import Request, Run
from saccade.inputs.media import MediaLimits
from saccade.inputs.processor import MediaOptions
from saccade.output import Mark, Output, TreeTrace
from saccade.text import Detokenizer, text_of


class GenerationOptions(TypedDict, total=False):
    """Hugging Face's arguments of `generate` that greedy decoding and sampling take, under their own names.

    The checkpoint's ``generation_config`` fills those that are left out. Processors and criteria are called per row
    and draft token; `saccade.processors` has the protocol.
    """

    generation_config: GenerationConfig | None
    logits_processor: Sequence[Any]
    stopping_criteria: Sequence[Any]
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None
    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    min_length: int | None
    max_time: float | None
    stop_strings: str | list[str] | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    top_h: float | None
    min_p: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    repetition_penalty: float | None
    encoder_repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    bad_words_ids: list[list[int]] | None
    sequence_bias: Any
    suppress_tokens: list[int] | None
    begin_suppress_tokens: list[int] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | list[int] | None
    exponential_decay_length_penalty: tuple[int, float] | None
    renormalize_logits: bool | None
    remove_invalid_values: bool | None
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None


class PromptOptions(GenerationOptions, total=False):
    """How a prompt's images, videos and texts are read, and its answer is generated.

    ``num_frames`` of a video file, or ``fps`` frames per second of it, are sampled instead of the checkpoint's own
    setting. ``limits`` are the accepted places, formats and sizes of images and videos. With ``text_as_text``, control
    tokens and placeholders in the text of messages are encoded as text.
    """

    num_frames: int | None
    fps: float | None
    limits: MediaLimits
    text_as_text: bool


def split_options(options: PromptOptions) -> tuple[MediaOptions, GenerationOptions]:
    """Options of reading, and the rest."""
    rest: Any = dict(options)
    media = MediaOptions(**{name: rest.pop(name) for name in MediaOptions.__dataclass_fields__ if name in rest})
    return media, rest


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one step.

    Attributes:
        text: completed characters of the first row.
        tokens: per row.
        marks: per row, the origin of each token.
        trees: per row, the verified tree; empty unless traced.
    """

    text: str
    tokens: tuple[tuple[int, ...], ...]
    marks: tuple[tuple[Mark, ...], ...]
    trees: tuple[TreeTrace | None, ...] = ()


class Stream:
    """A generation in progress; iteration may stop at any chunk, `outputs` holds the tokens so far."""

    def __init__(self, run: Run, tokenizer: Any, is_batch: bool, streamer: Any, requests: Sequence[Request]) -> None:
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
                self._streamer.end()  # or its reader in another thread would wait for ever

    def cancel(self) -> None:
        """End the generation; the tokens so far remain."""
        self._run.cancel()

    @property
    def outputs(self) -> list[Output]:
        """One output per row, up to the last step."""
        outputs = self._run.outputs
        for output in outputs:
            output.text = text_of(self._tokenizer, output.tokens)
        return outputs

    @property
    def output(self) -> Output:
        """The first row's output."""
        return self.outputs[0]
