"""Text of messages that never becomes control tokens: marks in it, and the encoder that takes them out again."""

from __future__ import annotations

import copy
import json
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any

from tokenizers import Encoding, Tokenizer
from transformers import BatchEncoding

from saccade.errors import InputError
from saccade.inputs.families.family import KINDS

_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Noncharacters of Unicode, of which each prompt uses one that its text lacks."""
_PASSES = 8
Span = tuple[int, int]


class Controls:
    """Control tokens of one tokenizer and chat template.

    These are its special tokens, the placeholders and wrappers of media, and other added tokens that the template
    writes, such as ``<think>`` or ``<tool_call>``. The last keep their meaning in messages of the assistant.
    """

    def __init__(self, tokenizer: Any, template: str | None, words: Iterable[str]) -> None:
        self.tokenizer = tokenizer  # a Hugging Face tokenizer
        added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        # ids of special tokens and media words; None for words that are no token
        self.special: dict[str, int | None] = {word: None for word in words if word.strip()}
        self.special |= {t.content: i for i, t in added.items() if t.special or t.content in self.special}
        written = {token.content: i for i, token in added.items() if token.content in (template or "")}
        self.all = {**written, **self.special}  # ids of all control tokens
        self.heads = frozenset(word[:n] for word in self.all for n in range(1, len(word)))  # proper beginnings
        self.tails = frozenset(word[n:] for word in self.all for n in range(1, len(word)))  # proper ends
        self._copies: dict[tuple[str, int], Tokenizer] = {}

    def dropping(self, mark: str) -> Iterator[Tokenizer]:
        """Copies of the tokenizer that drop a mark before text is divided into words, and divide it at controls."""
        for number in (0, 1):
            if (mark, number) not in self._copies:
                if len(self._copies) == 2:  # of another mark: a text chooses it, and copies are large
                    self._copies.clear()
                self._copies[mark, number] = self._new_copy(mark, number)
            yield self._copies[mark, number]

    def _new_copy(self, mark: str, number: int) -> Tokenizer:
        content = json.loads(self.tokenizer.backend_tokenizer.to_str())
        content |= {"truncation": None, "padding": None}
        if number == 0:
            step = "normalizer"
            change: dict[str, Any] = {"type": "Replace", "content": ""}
            content["added_tokens"] = [{**token, "normalized": False} for token in content["added_tokens"]]
        else:
            step = "pre_tokenizer"
            change = {"type": "Split", "behavior": "Removed", "invert": False}
        change["pattern"] = {"String": mark}
        rest = [content[step]] if content[step] else []
        content[step] = {"type": "Sequence", f"{step.replace('_', '')}s": [change, *rest]}
        return Tokenizer.from_str(json.dumps(content))


class LiteralText:
    """Encoder of one prompt whose messages are text.

    `mark` puts a noncharacter into every control token in the text of messages, so that neither the chat template
    nor the search for placeholders meets it; `encode` takes the marks out again. Text without control tokens passes
    unchanged, and has the ids that it has without this class.
    """

    def __init__(self, controls: Controls, texts: Iterable[str]) -> None:
        self._controls = controls
        self._tokenizer = controls.tokenizer
        used = set().union(*texts)
        self.character = next((mark for mark in _MARKS if mark not in used), "")
        if not self.character:
            raise InputError("The text has all 32 noncharacters of Unicode; take them out.")

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages with the control tokens in their text marked."""
        return [_map_strings(m, partial(self.mark_text, role=m["role"])) for m in messages]

    def mark_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Variables of a chat template with the control tokens in their text marked."""
        return {name: _map_strings(value, self.mark_text) for name, value in options.items()}

    def mark_text(self, text: str, role: str = "user") -> str:
        """Text of one message with its control tokens marked, and its ends where they could become part of one."""
        names = self._controls.special if role == "assistant" else self._controls.all
        for _ in range(_PASSES):
            places = [0, *sorted({start + 1 for start, _ in self._matches(text, names)}), len(text)]
            if len(places) == 2:
                return self._mark_ends(text)
            text = self.character.join(text[a:b] for a, b in pairwise(places))
        raise self._refusal(text)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a rendered prompt."""
        clean = text.replace(self.character, "")
        breaks = [(place - n, place - n) for n, place in enumerate(self._places(text))]
        if not self._tokenizer.is_fast:  # without the places of tokens
            if any(_covers(span, breaks) for span in _find(clean, self._controls.all)):
                raise self._refusal(clean)
            return list(self._tokenizer(clean, add_special_tokens=add_special_tokens)["input_ids"])
        encoding = self._tokenizer(clean, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        if self._has_control(clean, encoding["input_ids"], encoding["offset_mapping"], breaks):
            return list(self._encoding(text, add_special_tokens).ids)
        return list(encoding["input_ids"])

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        """Encoding of a marked text by a tokenizer that drops the marks."""
        breaks = [(place, place + 1) for place in self._places(text)]
        for backend in self._controls.dropping(self.character):
            encoding = backend.encode(text, add_special_tokens=add_special_tokens)
            if not self._has_control(text, encoding.ids, encoding.offsets, breaks):
                return encoding
        raise self._refusal(text)

    def _places(self, text: str) -> list[int]:
        return [i for i, sign in enumerate(text) if sign == self.character]

    def through(self, processor: Any) -> Any:
        """A copy of a Hugging Face processor that encodes its text, placeholders expanded, by `encode`."""
        processor = copy.copy(processor)
        processor.tokenizer = _LiteralTokenizer(self._tokenizer, self)
        return processor

    def _matches(self, text: str, names: Mapping[str, int | None]) -> Iterator[Span]:
        """Places of control tokens; a tokenizer can also see some in other signs, which it normalises."""
        if not self._tokenizer.is_fast:
            yield from _find(text, names)
            return
        yield from _find(text, [name for name, i in names.items() if i is None])
        made = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = set(names.values())
        for i, span in zip(made["input_ids"], made["offset_mapping"], strict=True):
            if i in ids:
                yield _stripped(text, span)

    def _mark_ends(self, text: str) -> str:
        core = text.strip()
        longest = max(map(len, self._controls.all), default=0)
        head, tail = (unicodedata.normalize("NFKC", part) for part in (core[:longest], core[-longest:]))
        lengths = range(1, longest)
        if any(head[:n] in self._controls.tails for n in lengths):
            core = self.character + core
        if any(tail[-n:] in self._controls.heads for n in lengths):
            core += self.character
        start = len(text) - len(text.lstrip())
        return text[:start] + core + text[len(text.rstrip()) :] if core else text

    def _has_control(self, text: str, ids: Sequence[int], spans: Sequence[Span], breaks: Sequence[Span]) -> bool:
        """Whether a control token reaches over a mark."""
        pairs = zip(ids, spans, strict=True)
        controls = set(self._controls.all.values())
        return any(i in controls and _covers(_stripped(text, span), breaks) for i, span in pairs)

    def _refusal(self, text: str) -> InputError:
        names = [name for name in self._controls.all if name in text.replace(self.character, "")]
        return InputError(
            f"The text contains the control token {max(names, key=len, default='of the model')}, which this tokenizer "
            "cannot encode as text; take it out."
        )


class _LiteralTokenizer:
    """A tokenizer for a Hugging Face processor; all but the call is the original's."""

    def __init__(self, tokenizer: Any, literal: LiteralText) -> None:
        self._tokenizer = tokenizer
        self._literal = literal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(
        self, text: str | list[str], *, add_special_tokens: bool = True, return_tensors: Any = None, **_: Any
    ) -> BatchEncoding:
        texts = [text] if isinstance(text, str) else text
        encodings = None
        if self._tokenizer.is_fast:
            encodings = [self._literal._encoding(row, add_special_tokens) for row in texts]
            rows = [list(made.ids) for made in encodings]
        else:
            rows = [self._literal.encode(row, add_special_tokens) for row in texts]
        made = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        return BatchEncoding(made, encodings, tensor_type=return_tensors)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Nested lists and dictionaries with changed strings; the types of message parts remain."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {k: v if k == "type" and v in ("text", *KINDS) else _map_strings(v, change) for k, v in value.items()}
    return [_map_strings(entry, change) for entry in value] if isinstance(value, (list, tuple)) else value


def _find(text: str, names: Iterable[str]) -> Iterator[Span]:
    for name in names:
        yield from (match.span() for match in re.finditer(re.escape(name), text))


def _stripped(text: str, span: Span) -> Span:
    """A token's place without the white space around it, which some control tokens swallow."""
    piece = text[slice(*span)]
    return span[0] + len(piece) - len(piece.lstrip()), span[1] - (len(piece) - len(piece.rstrip()))


def _covers(span: Span, breaks: Sequence[Span]) -> bool:
    """Whether one of the breaks, which are in order, is inside the span."""
    first = bisect_right(breaks, span[0], key=itemgetter(0))
    return first < len(breaks) and breaks[first][1] < span[1]
