"""Generation options, an answer in progress (chunks of text and tokens, then the outputs), and text from tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from saccade.engine import Request, Run
from saccade.inputs.media import MediaLimits
from saccade.inputs.processor import DEFAULT_MEDIA, MediaOptions
from saccade.output import Chunk, Output


class GenerationOptions(TypedDict, total=False):
    """Hugging Face's arguments of `generate` that greedy decoding and sampling take, under their own names.

    The checkpoint's ``generation_config`` fills those that are left out. Processors and criteria are called per row
    and draft token; `saccade.processors` has the protocol.

    >>> output = saccade.load("pocket").generate("Hello", do_sample=True, temperature=0.7, seed=1, max_new_tokens=4)
    >>> len(output.tokens)
    4
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

    ``num_frames`` of a video, or ``fps`` frames per second of it, are sampled instead of the checkpoint's own setting;
    of frames that are no file, otherwise all are used. ``limits`` are the accepted places, formats and sizes of images
    and videos. With ``text_as_text``, control tokens and placeholders in the text of messages are encoded as text.
    ``template_options`` are variables of the chat template, such as ``tools`` or ``enable_thinking``.

    >>> film = draw(1, "video").video
    >>> vlm = saccade.load("pocket")
    >>> few, more = (vlm.generate("Hello", videos=[film], num_frames=n, max_new_tokens=1) for n in (2, 4))
    >>> few.stats.prompt_tokens < more.stats.prompt_tokens
    True
    """

    num_frames: int | None
    fps: float | None
    limits: MediaLimits
    text_as_text: bool
    template_options: Mapping[str, Any]


def split_options(options: PromptOptions) -> tuple[MediaOptions, GenerationOptions]:
    """Options of reading, and the rest."""
    rest: Any = dict(options)
    media = {name: rest.pop(name) for name in MediaOptions.__dataclass_fields__ if name in rest}
    return MediaOptions(**media) if media else DEFAULT_MEDIA, rest


class Stream:
    """A generation in progress; iteration may stop at any chunk, `outputs` holds the tokens so far.

    >>> stream = saccade.load("pocket").stream(["Hello", "Bye"], max_new_tokens=4)
    >>> [len(output.tokens) for output in stream.finish()]
    [4, 4]
    """

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
                piece = self._text.decode(step.tokens[0], step.finished[0])
                if self._streamer is not None:
                    for token in step.tokens[0]:
                        self._streamer.put(torch.tensor([token]))
                yield replace(step, text=piece)
        finally:
            if self._streamer is not None:
                self._streamer.end()  # or its reader in another thread would wait without end

    def finish(self) -> list[Output]:
        """Run to the end, without the text of single steps, and return the outputs."""
        for _ in self._run.steps if self._streamer is None else self:
            pass
        return self.outputs

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


INCOMPLETE = "\ufffd"  # replacement character of tokenizers for bytes that form no complete character


def decode(tokenizer: Any, ids: Sequence[int], special: bool = False) -> str:
    """Decode ids to text, by default without special tokens; cleaned up spaces would change text that was streamed."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False))


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of ids as streamed: the joined pieces of a `Detokenizer`.

    It differs from `decode` only where bytes form no character and the tokenizer also replaces valid characters before
    them (byte fallback), because streamed text cannot be withdrawn.
    """
    return Detokenizer(tokenizer).decode(ids, finished=True)


class TokenTexts:
    """Texts and bytes of single tokens, as they are inside of a text.

    Some tokenizers strip the space at the beginning of a text, which a token alone would lose.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._length = len(self._decode(self._before))
        self._bytes = {sign: byte for byte, sign in bytes_to_unicode().items()}  # of byte-level vocabularies

    def text(self, token: int) -> str:
        """Text of a token; replacement characters for parts of characters."""
        return self._decode([*self._before, token])[self._length :]

    def utf8(self, token: int) -> bytes:
        """UTF-8 of a token, which may be a part of a character."""
        text = self.text(token)
        piece = self._tokenizer.convert_ids_to_tokens(token) if INCOMPLETE in text else None
        if isinstance(piece, str):
            if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):  # byte fallback
                return bytes([int(piece[3:5], 16)])
            if all(sign in self._bytes for sign in piece):
                return bytes(self._bytes[sign] for sign in piece)
        return text.encode()

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


class Detokenizer:
    """Incremental decoder of a growing list of ids.

    Incomplete characters (one character can be several tokens) are held back, so the joined pieces are the text of all
    ids (see `text_of`), whatever the number of ids per call.
    """

    def __init__(self, tokenizer: Any, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special  # whether special tokens have a text
        self._ids: list[int] = []
        self._start = 0  # ids from here on are decoded together, for correct spaces between tokens
        self._read = 0  # ids before here are in the text returned so far

    def add(self, ids: Sequence[int]) -> str:
        """Append ids and return the text that they complete."""
        first = len(self._ids)
        self._ids.extend(ids)
        piece = self._new(len(self._ids))
        if INCOMPLETE not in piece:
            return self._return(piece, len(self._ids))
        # Invalid bytes may spoil their neighbours: decode token by token, whatever the number of ids per call.
        return "".join(self._complete(stop) for stop in range(first + 1, len(self._ids) + 1))

    def decode(self, ids: Sequence[int], finished: bool) -> str:
        """Append the ids of a step and return the text that they complete, or all of it at the end."""
        text = self.add(ids)
        return text + self.finish() if finished else text

    def finish(self) -> str:
        """Return the text held back."""
        return self._return(self._new(len(self._ids)), len(self._ids))

    def _complete(self, stop: int) -> str:
        piece = self._new(stop)
        return "" if piece.endswith(INCOMPLETE) else self._return(piece, stop)

    def _new(self, stop: int) -> str:
        """Text of the ids before ``stop`` that has not been returned."""
        before = decode(self._tokenizer, self._ids[self._start : self._read], self._special)
        text = decode(self._tokenizer, self._ids[self._start : stop], self._special)
        if not text.startswith(before):  # spoilt by the new ids
            return decode(self._tokenizer, self._ids[self._read : stop], self._special)
        return text[len(before) :]

    def _return(self, piece: str, stop: int) -> str:
        # Tokens without text (special ones, or a leading space, which some tokenizers drop) show neither the place of
        # spaces nor spoilt characters.
        if piece.strip(" "):
            self._start = self._read
        self._read = stop
        return piece
