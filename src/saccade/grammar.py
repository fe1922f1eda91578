"""Grammars and JSON schemas on draft trees, by the matchers of llguidance (``saccade[grammar]``).

>>> schema = saccade.grammar.json_schema({"type": "object"}, tokenizer, vocab_size)
>>> vlm.generate("Describe the picture as JSON.", images=["photo.jpg"], logits_processor=[schema])
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from saccade.errors import InputError
from saccade.schema import check_enforced, enforceable
from saccade.target_model.cache import on_device, to_device
from saccade.wording import first_line

MOST_OPTIONAL = 1000
"""Optional properties of an object that llguidance follows: a mask then takes 5 ms, and grows with their square."""
SPACING = ("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator")
"""Options of llguidance that a schema in a Lark grammar may set under ``x-guidance``."""
MOST_BLANKS = 12
"""White space between two parts of JSON where it is allowed: small models fill an answer with unbounded white space."""
Result = TypeVar("Result")
Packed = np.ndarray[Any, np.dtype[np.uint8]]
_DEAD_END = (
    "The grammar allows no text here, not even the end of the answer; a $ref must lead to something else than itself, "
    "and what is required must be possible."
)


class Place:
    """State of the processor: a path of tokens after the prompt, and what is known of the grammar there."""

    __slots__ = ("_packed", "_run", "_walk", "children", "depth", "parent", "token")

    def __init__(self, walk: _Walk, parent: Place | None, token: int) -> None:
        self._walk, self.parent, self.token = walk, parent, token
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[int, Place] = {}
        self._run: tuple[int, ...] | None = None
        self._packed: Packed | None = None

    @property
    def run(self) -> tuple[int, ...]:
        """Tokens each of which is the only one allowed after those before it; empty where there is a choice."""
        if self._run is None:
            self._run = self._walk.run(self)
        return self._run

    @property
    def packed(self) -> Packed:
        """Bits of the tokens allowed next, the lowest bit first."""
        if self._packed is None:
            self._packed = self._walk.packed(self)
        return self._packed

    @property
    def count(self) -> int:
        """Tokens allowed next."""
        return 1 if self.run else _ones(self.packed)

    @property
    def guess(self) -> Sequence[int]:
        """Tokens in which a tokenizer would write the text that has to follow, the last of which may be longer."""
        return self._walk.guess(self)

    def spelling(self, token: int) -> bytes:
        """Text of a token; empty where it is not known."""
        return self._walk.grammar.spelling(token)

    def allows(self, token: int) -> bool:
        """Whether a token is allowed next."""
        if self.run:
            return token == self.run[0]
        byte = token >> 3
        return 0 <= byte < len(self.packed) and bool(self.packed[byte] >> (token & 7) & 1)

    def settle(self) -> None:
        """Forget the places that are not after this one."""
        self._walk.settle(self)
        before, self.parent = self.parent, None
        while before is not None:  # else their masks would stay until cycles are collected
            before.children.clear()
            before = before.parent

    def ahead(self, token: int) -> Place | None:
        """The place after a token that is allowed; None for others, and where the grammar has no answer after it.

        Plain decoding may never get there, so that the matcher's complaint is for the row that does.
        """
        if not self.allows(token):
            return None
        place = self.after(token)
        try:
            place.run  # noqa: B018  (or its mask, which is needed anyway)
        except Exception:
            return None
        return place

    def after(self, token: int) -> Place:
        """The place one token further."""
        child = self.children.get(token)
        if child is None:
            child = self.children[token] = Place(self._walk, self, token)
        return child


def _ones(packed: Packed) -> int:
    return int.from_bytes(packed.tobytes(), "little").bit_count()


class _Walk:
    """A row's matcher, which moves from place to place."""

    def __init__(self, grammar: Rollback) -> None:
        self.grammar, self._matcher = grammar, grammar.matcher()
        self._at = Place(self, None, -1)
        self._settled: list[int] = []  # tokens of the places that are forgotten

    @property
    def start(self) -> Place:
        return self._at

    def run(self, place: Place) -> tuple[int, ...]:
        """As of `Place.run`; where the matcher names none, by the tokens that are allowed."""
        run = tuple(self._looked(place, self.grammar.forced))
        if not run:
            packed = place.packed
            if _ones(packed) == 1:
                byte = int(packed.argmax())
                run = (8 * byte + int(packed[byte]).bit_length() - 1,)
        after = place
        for number, token in enumerate(run[:-1], 1):
            after = after.after(token)
            after._run = run[number:]
        return run

    def guess(self, place: Place) -> Sequence[int]:
        """As of `Place.guess`."""
        return self._looked(place, self.grammar.guess)

    def packed(self, place: Place) -> Packed:
        """As of `Place.packed`; raises `InputError` where nothing is allowed."""
        packed = np.frombuffer(self._looked(place, self.grammar.packed), np.uint8)
        if not packed.any():
            raise InputError(_DEAD_END)
        return packed

    def _looked(self, place: Place, look: Callable[[Any], Result]) -> Result:
        """What the matcher says after a place; one that has given up, which no rollback mends, is replaced."""
        try:
            return look(self.move(place))
        except Exception:
            self._matcher = self.grammar.matcher()
            for token in self._settled:
                self.grammar.accept(self._matcher, token)
            *_, self._at = self._path(place)
            raise

    def _path(self, place: Place) -> Iterator[Place]:
        """A place and those in front of it, up to the first one that is known."""
        at: Place | None = place
        while at is not None:
            yield at
            at = at.parent

    def settle(self, place: Place) -> None:
        """Move to a place, in front of which none is needed any more."""
        self.move(place)
        self._settled += [each.token for each in self._path(place) if each.parent is not None][::-1]

    def move(self, place: Place) -> Any:
        """Return the matcher after a place: back to the common ancestor, then forward."""
        ahead, back = [], 0
        near, far = self._at, place
        while near is not far:
            if far.depth > near.depth:
                ahead.append(far)
                assert far.parent is not None
                far = far.parent
            else:
                back += 1
                assert near.parent is not None
                near = near.parent
        if back:
            self.grammar.rollback(self._matcher, back)
            self._at = near
        for each in reversed(ahead):
            if not self.grammar.accept(self._matcher, each.token):
                raise InputError(
                    f"The grammar does not allow token {each.token} after {each.depth - 1} new tokens; let the "
                    "grammar's stop tokens be among eos_token_id, and use a lossless method."
                )
            self._at = each
        return self._matcher


class Rollback(ABC):
    """A `StatefulProcessor` around a matcher that accepts tokens and rolls them back.

    One matcher per row moves from node to node of the draft tree. The grammar constrains the answer and ends it; the
    matcher never receives the prompt.
    """

    ends: frozenset[int] = frozenset()
    """Ids that end an answer, where the grammar knows them."""

    @abstractmethod
    def matcher(self) -> Any:
        """Return a new matcher at the start of the grammar."""

    @abstractmethod
    def accept(self, matcher: Any, token: int) -> bool:
        """Advance by a token; return False, without advancing, if the grammar does not allow it."""

    @abstractmethod
    def rollback(self, matcher: Any, count: int) -> None:
        """Roll back the last ``count`` tokens."""

    @abstractmethod
    def packed(self, matcher: Any) -> Any:
        """Return the bits of the tokens allowed next as bytes, the lowest bit first."""

    def forced(self, matcher: Any) -> Sequence[int]:
        """Return tokens each of which is the only one that `packed` allows after those before it, as far as known."""
        return ()

    def guess(self, matcher: Any) -> Sequence[int]:
        """Return the tokens in which a tokenizer would write the text that has to follow; none where that is open."""
        return ()

    def spelling(self, token: int) -> bytes:
        """Return the text of a token; empty where it is not known."""
        return b""

    def start(self, prompt: Sequence[int]) -> Place:
        return _Walk(self).start

    def advance(self, state: Place, token: int) -> Place:
        return state.after(token)

    def settle(self, state: Place) -> None:
        """Forget the places that are not after a state."""
        state.settle()

    def scores(self, state: Place, scores: Tensor) -> Tensor:
        """Scores with -inf for tokens that are not allowed, 0 for others where earlier processors forbid them all."""
        return self.all_scores([state], scores[None])[0]

    def all_scores(self, states: Sequence[Place], scores: Tensor, first: bool = False) -> Tensor:
        """Process scores ``[n, V]`` of n places in place; ``first``: no processor before this one forbids a token."""
        scores = masked(scores, states)
        if first:
            return scores
        dead = ~scores.amax(1).isfinite()
        for place in dead.nonzero().flatten().tolist():
            scores[place] = masked(torch.zeros_like(scores[place, None]), [states[place]])[0]
        return scores


def masked(scores: Tensor, places: Sequence[Place]) -> Tensor:
    """Set scores ``[n, V]`` to -inf in place for the tokens that are not allowed at n places."""
    count, device = scores.shape[1], scores.device
    free = [number for number, place in enumerate(places) if not place.run]
    for number, place in enumerate(places):
        if place.run:
            only = scores[number, place.run[0]].clone()
            scores[number] = float("-inf")
            scores[number, place.run[0]] = only
    if not free:
        return scores
    packed = [places[number].packed for number in free]
    if device.type == "cpu":  # row by row, which stays in the processor's cache
        for number, bits in zip(free, packed, strict=True):
            limits = torch.from_numpy(_LIMITS.take(bits, axis=0).reshape(-1)[:count])
            scores[number, : len(limits)].clamp_(max=limits)
            scores[number, len(limits) :] = float("-inf")
        return scores
    sent = to_device(torch.from_numpy(np.stack(packed)), device)
    limits = _limits(device)[sent.long()].flatten(1)[:, :count]
    limits = torch.nn.functional.pad(limits, (0, count - limits.shape[1]), value=float("-inf"))
    if len(free) == len(places):
        return scores.clamp_(max=limits)
    at = on_device(free, device)
    scores[at] = scores[at].clamp(max=limits)
    return scores


_LIMITS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_LIMITS = _LIMITS.astype(np.float32)
"""By byte of packed bits the greatest scores of its eight tokens: infinite for those that are allowed, else -inf."""


@cache
def _limits(device: torch.device) -> Tensor:
    """`_LIMITS` on a device."""
    return torch.from_numpy(_LIMITS).to(device)


class XGrammar(Rollback):
    """A grammar that a user compiled with xgrammar, which alone decides what of a schema is enforced."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.ends = frozenset(compiled.tokenizer_info.stop_token_ids)
        words: Sequence[bytes] = compiled.tokenizer_info.decoded_vocab
        self._words = words
        self._ids = {word: token for token, word in reversed(list(enumerate(words))) if word}
        self._longest = max(map(len, self._ids), default=0)

    def matcher(self) -> Any:
        import xgrammar

        return xgrammar.GrammarMatcher(self._compiled)

    def accept(self, matcher: Any, token: int) -> bool:
        return not matcher.is_terminated() and bool(matcher.accept_token(token))

    def rollback(self, matcher: Any, count: int) -> None:
        matcher.rollback(count)

    def packed(self, matcher: Any) -> bytes:
        mask = torch.full((1, -(-self._compiled.tokenizer_info.vocab_size // 32)), -1, dtype=torch.int32)
        matcher.fill_next_token_bitmask(mask)
        return mask.numpy().tobytes()

    def guess(self, matcher: Any) -> Sequence[int]:
        text = matcher.find_jump_forward_string().encode()
        lengths = range(min(len(text), self._longest), 0, -1)
        return [self._ids[text[:length]] for length in lengths if text[:length] in self._ids][:1]

    def spelling(self, token: int) -> bytes:
        return self._words[token] if token < len(self._words) else b""


class LLGuidance(Rollback):
    """A grammar of ``llguidance.LLMatcher`` for an ``llguidance.LLTokenizer``."""

    def __init__(self, tokenizer: Any, grammar: str) -> None:
        import llguidance

        self._tokenizer, self.ends = tokenizer, frozenset(tokenizer.eos_tokens)
        limits = llguidance.LLParserLimits(max_items_in_row=4 * MOST_OPTIONAL + 100, verbose_errors=False)
        self._matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split())
            raise InputError(f"llguidance rejects the grammar ({reason}); correct it.")
        matcher = self.matcher()
        begin = matcher.compute_ff_bytes().decode(errors="ignore")
        matcher.try_consume_tokens(tokenizer.greedy_tokenize(begin))
        self.packed(matcher)

    def matcher(self) -> Any:
        return self._matcher.deep_copy()

    def accept(self, matcher: Any, token: int) -> bool:
        accepted = not matcher.is_stopped() and matcher.try_consume_tokens([token]) == 1
        _check(matcher)
        return accepted

    def rollback(self, matcher: Any, count: int) -> None:
        matcher.rollback(count)

    def packed(self, matcher: Any) -> bytes:
        apart = matcher.deep_copy()  # a matcher keeps its last mask through a rollback, and may give it out elsewhere
        bits: bytes = apart.compute_bitmask()
        _check(apart)
        return bits

    def forced(self, matcher: Any) -> Sequence[int]:
        if matcher.is_stopped() or not self._tokenizer.is_canonical:
            return ()
        run: Sequence[int] = matcher.compute_ff_tokens()
        _check(matcher)
        return run

    def guess(self, matcher: Any) -> Sequence[int]:
        text = b"" if matcher.is_stopped() else matcher.compute_ff_bytes()
        tokens: Sequence[int] = self._tokenizer.tokenize_bytes(text) if text else ()
        return tokens

    def spelling(self, token: int) -> bytes:
        word: bytes = self._tokenizer.decode_bytes([token])
        return word


def _check(matcher: Any) -> None:
    """Report a matcher of llguidance that has given up: it then allows the end of the answer, and nothing else."""
    if matcher.is_error():
        reason = re.split("; (?:consider|try)|\n", matcher.get_error())[0]
        raise InputError(
            _DEAD_END
            if reason.startswith("NoExtension")
            else f"llguidance cannot follow the grammar ({reason}): an object may have {MOST_OPTIONAL} optional "
            "properties, no $ref may require itself without end, and no expression may repeat much; make it smaller."
        )


def json_schema(
    schema: str | Mapping[str, Any], tokenizer: Any, vocab_size: int, *, whitespace: bool = False
) -> Rollback:
    """Return a processor that constrains an answer to JSON of a schema.

    Args:
        schema: a JSON schema. An object of it has no properties but those that it names, unless its
            ``additionalProperties`` says otherwise.
        tokenizer: a fast tokenizer of transformers; its end-of-sequence token ends the answer.
        vocab_size: of the model's logits, which may exceed the tokenizer's.
        whitespace: whether the JSON may have up to `MOST_BLANKS` blanks and line breaks between its parts; it is
            compact otherwise.

    Raises:
        InputError: the schema cannot be compiled or followed, a keyword of it cannot be enforced, or llguidance is not
            installed.

    >>> vlm = saccade.load("pocket")
    >>> form = saccade.grammar.json_schema(
    ...     {"type": "object", "properties": {"bars": {"enum": [3, 4, 5]}}, "required": ["bars"]},
    ...     vlm.processor.tokenizer,
    ...     vlm.target.vocab_size,
    ... )
    >>> vlm.generate("How many?", images=[draw(1, "chart").image], logits_processor=[form]).text
    '{"bars":4}'
    """
    text = json.dumps(enforceable(schema))
    pattern = rf"[ \n]{{0,{MOST_BLANKS}}}" if whitespace else None
    options = {"whitespace_flexible": whitespace, "whitespace_pattern": pattern}
    with _compiling("schema") as compiler:
        grammar = compiler.grammar_from_json_schema(text, defaults=options)
        return _possible(LLGuidance(_guided(tokenizer, vocab_size), grammar), vocab_size)


def lark(grammar: str, tokenizer: Any, vocab_size: int) -> Rollback:
    """Return a processor that constrains an answer to a grammar in llguidance's Lark.

    Args:
        grammar: rules, of which ``start`` is the answer.
        tokenizer, vocab_size: as of `json_schema`.

    Raises:
        InputError: the grammar cannot be compiled, a keyword of a schema in it cannot be enforced, or llguidance is not
            installed.
    """
    for place in re.finditer(r"%json\s*", grammar):
        schema = None
        with suppress(ValueError):  # text that only looks like a schema
            schema, _ = json.JSONDecoder().raw_decode(grammar, place.end())
        check_enforced(schema, SPACING)
    with _compiling("grammar") as compiler:
        grammar = compiler.grammar_from_lark(grammar)
        return _possible(LLGuidance(_guided(tokenizer, vocab_size), grammar), vocab_size)


def _possible(constraint: Rollback, vocab_size: int) -> Rollback:
    """Refuse a grammar without any answer."""
    constraint.scores(constraint.start(()), torch.zeros(vocab_size))
    return constraint


@contextmanager
def _compiling(what: str) -> Iterator[Any]:
    """Yield llguidance's compiler, and convert its errors to `InputError`."""
    if not find_spec("llguidance"):
        raise InputError("Schemas and grammars need llguidance; run `pip install 'saccade[grammar]'`.")
    from llguidance import LLMatcher

    try:
        yield LLMatcher
    except InputError:
        raise
    except (ValueError, RuntimeError) as problem:
        raise InputError(f"llguidance cannot compile the {what} ({first_line(problem)}); correct it.") from problem


_GUIDED: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()


def _guided(tokenizer: Any, vocab_size: int) -> Any:
    """Return llguidance's form of a tokenizer, made once: it reads the whole vocabulary."""
    import llguidance.hf

    known = _GUIDED.setdefault(tokenizer, {})
    if vocab_size not in known:
        known[vocab_size] = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size)
    return known[vocab_size]


def of_xgrammar(processor: Any, row: int) -> XGrammar:
    """Convert xgrammar's own processor (``xgrammar.contrib.hf.LogitsProcessor``) for one row."""
    grammars = getattr(processor, "compiled_grammars", None)
    if not grammars or (len(grammars) > 1 and row >= len(grammars)):
        raise InputError(
            f"{type(processor).__name__} of xgrammar has no grammar for row {row}; give one for all rows or one each."
        )
    return XGrammar(grammars[row if len(grammars) > 1 else 0])
