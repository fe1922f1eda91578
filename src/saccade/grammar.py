"""Grammars and JSON schemas on draft trees, by the matchers of llguidance (``saccade[grammar]``).

>>> schema = saccade.grammar.json_schema({"type": "object"}, tokenizer, vocab_size)
>>> vlm.generate("Describe the picture as JSON.", images=["photo.jpg"], logits_processor=[schema])
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from saccade.errors import InputError
from saccade.schema import check_enforced, enforceable
from saccade.wording import first_line

MOST_OPTIONAL = 1000
"""Optional properties of an object that llguidance follows: a mask then takes 5 ms, and grows with their square."""
SPACING = ("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator")
"""Options of llguidance that a schema in a Lark grammar may set under ``x-guidance``."""
MOST_BLANKS = 12
"""White space between two parts of JSON where it is allowed: small models fill an answer with unbounded white space."""
_DEAD_END = (
    "The grammar allows no text here, not even the end of the answer; a $ref must lead to something else than itself, "
    "and what is required must be possible."
)


@dataclass(slots=True)
class _Walk:
    """A matcher and its accepted tokens behind the prompt."""

    matcher: Any
    path: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Place:
    """State of the processor: a path of tokens behind the prompt."""

    walk: _Walk
    path: tuple[int, ...]


class Rollback(ABC):
    """A `StatefulProcessor` around a matcher that accepts tokens and rolls them back.

    One matcher per row moves from node to node of the draft tree: back to the common ancestor, then forward. The
    grammar constrains the answer and ends it; the matcher never receives the prompt.
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
    def allowed(self, matcher: Any, vocab_size: int) -> Tensor:
        """Return ``[V]`` bool on the CPU: tokens allowed next."""

    def start(self, prompt: Sequence[int]) -> _Place:
        return _Place(_Walk(self.matcher()), ())

    def advance(self, state: _Place, token: int) -> _Place:
        return _Place(state.walk, (*state.path, token))

    def scores(self, state: _Place, scores: Tensor) -> Tensor:
        """Scores with -inf for tokens that are not allowed, 0 for others where earlier processors forbid them all."""
        self._move(state.walk, state.path)
        allowed = self.allowed(state.walk.matcher, len(scores)).to(scores.device)
        if not allowed.any():
            raise InputError(_DEAD_END)
        scores.masked_fill_(~allowed, float("-inf"))
        return scores if scores.max().isfinite() else scores.masked_fill_(allowed, 0.0)

    def _move(self, walk: _Walk, path: tuple[int, ...]) -> None:
        shared = 0
        while shared < min(len(walk.path), len(path)) and walk.path[shared] == path[shared]:
            shared += 1
        if len(walk.path) > shared:
            self.rollback(walk.matcher, len(walk.path) - shared)
            del walk.path[shared:]
        for token in path[shared:]:
            if not self.accept(walk.matcher, token):
                raise InputError(
                    f"The grammar does not allow token {token} behind {len(walk.path)} new tokens; let the grammar's "
                    "stop tokens be among eos_token_id, and use a lossless method."
                )
            walk.path.append(token)


class XGrammar(Rollback):
    """A grammar that a user compiled with xgrammar, which alone decides what of a schema is enforced."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.ends = frozenset(compiled.tokenizer_info.stop_token_ids)

    def matcher(self) -> Any:
        import xgrammar

        return xgrammar.GrammarMatcher(self._compiled)

    def accept(self, matcher: Any, token: int) -> bool:
        return not matcher.is_terminated() and bool(matcher.accept_token(token))

    def rollback(self, matcher: Any, count: int) -> None:
        matcher.rollback(count)

    def allowed(self, matcher: Any, vocab_size: int) -> Tensor:
        mask = torch.full((1, -(-self._compiled.tokenizer_info.vocab_size // 32)), -1, dtype=torch.int32)
        matcher.fill_next_token_bitmask(mask)
        return _bits(mask[0], vocab_size)


class LLGuidance(Rollback):
    """A grammar of ``llguidance.LLMatcher`` for an ``llguidance.LLTokenizer``."""

    def __init__(self, tokenizer: Any, grammar: str) -> None:
        self._tokenizer, self._grammar = tokenizer, grammar
        self.ends = frozenset(tokenizer.eos_tokens)
        matcher = self.matcher()
        begin = matcher.compute_ff_bytes().decode(errors="ignore")
        matcher.try_consume_tokens(tokenizer.greedy_tokenize(begin))
        self.allowed(matcher, 0)

    def matcher(self) -> Any:
        import llguidance

        limits = llguidance.LLParserLimits(max_items_in_row=4 * MOST_OPTIONAL + 100, verbose_errors=False)
        matcher = llguidance.LLMatcher(self._tokenizer, self._grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise InputError(f"llguidance rejects the grammar ({' '.join(matcher.get_error().split())}); correct it.")
        return matcher

    def accept(self, matcher: Any, token: int) -> bool:
        accepted = not matcher.is_stopped() and matcher.try_consume_tokens([token]) == 1
        _check(matcher)
        return accepted

    def rollback(self, matcher: Any, count: int) -> None:
        matcher.rollback(count)

    def allowed(self, matcher: Any, vocab_size: int) -> Tensor:
        mask = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)
        _check(matcher)
        return _bits(mask, vocab_size)


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


def _bits(words: Tensor, vocab_size: int) -> Tensor:
    """Unpack int32 words to ``[V]`` bool, the lowest bit first; False behind the last one."""
    bits = ((words[:, None] >> torch.arange(32)) & 1).bool().flatten()
    return torch.nn.functional.pad(bits, (0, max(vocab_size - len(bits), 0)))[:vocab_size]
