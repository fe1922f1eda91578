"""Decoding options of a request: Hugging Face's names, penalties, stop strings, schemas and log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from saccade.engine.row import RowPlan, ends_of
from saccade.engine.row import plan as plan_rows
from saccade.grammar import Rollback, json_schema, lark
from saccade.inputs.families.family import Prompt
from saccade.serve.configuration import Limits
from saccade.serve.refusals import invalid
from saccade.serve.replies import ReplyParser
from saccade.serve.schemas import AnyRequest, ChatRequest
from saccade.serve.tools import ReplyFormat, policy_of, structure_rule
from saccade.stream import Detokenizer

if TYPE_CHECKING:
    from saccade.vlm import VLM

GREEDY_BELOW = 1e-5  # temperatures below this are greedy decoding, as in vLLM; smaller ones overflow
UNKNOWN_LOGPROB = -9999.0  # OpenAI's value for tokens without a log-probability
MOST_SCHEMAS = 64
MOST_SCHEMA_BYTES = 64 * 1024


class Penalties:
    """Presence and frequency penalty over the tokens of the answer, as OpenAI defines them.

    Stateless in the sense of `saccade.processors`: depends on the ids alone.
    """

    stateless = True

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self._prompt_length, self._presence, self._frequency = prompt_length, presence, frequency

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        answer = ids[:, self._prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)


class StopCutter:
    """Text up to the first stop string; text that may begin one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""
        self.stop: str | None = None  # the first, once there is one

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    def add(self, text: str, last: bool = False, counts: bool = True) -> str:
        """Append text and return what can no longer be part of a stop string.

        ``last``: nothing follows; ``counts``: whether a stop string whose end is in this text counts.
        """
        if not self._stops or self.stopped:
            return "" if self.stopped else text
        held = self._held + text
        places = [(place, stop) for stop in self._stops if counts and (place := held.find(stop)) >= 0]
        if places:
            place, self.stop = min(places)
            self._held = ""
            return held[:place]
        most = 0 if last else min(len(held), max(map(len, self._stops)) - 1)
        ends = (held[len(held) - n :] for n in range(most, 0, -1))
        self._held = next((end for end in ends if any(stop.startswith(end) for stop in self._stops)), "")
        return held[: len(held) - len(self._held)]


class StopText:
    """Stopping criterion: beyond ``minimum`` ids the content ends one of the strings. One object serves one row.

    Unlike Hugging Face's it takes no pass over the vocabulary per set of strings, which clients choose.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str],
        prompt_length: int,
        minimum: int,
        parser: ReplyParser | None,
        hidden: frozenset[int],
    ) -> None:
        self._text, self._cutter = Detokenizer(tokenizer, special=parser is not None), StopCutter(stops)
        self._parser, self._hidden, self._read = parser, hidden, prompt_length
        self._minimum = minimum

    def __call__(self, ids: Tensor, scores: Any) -> bool:
        """Whether the content in the ids ``[1, S]`` behind the prompt contains a stop string."""
        new = ids[0, self._read :].tolist()
        text = self._text.add([token for token in new if token not in self._hidden])
        if self._parser is not None:
            text = self._parser.add(text).content
        self._cutter.add(text, counts=ids.shape[1] > self._minimum)
        self._read = ids.shape[1]
        return self._cutter.stopped


def stops_of(body: AnyRequest) -> Sequence[str]:
    """Stop strings of an answer; one that has a form is ended by it alone."""
    return () if body.structures or policy_of(body).forced else body.stops


@dataclass(eq=False, slots=True)
class _Place:
    """Position behind a path of tokens, with the logits that followed it."""

    logits: Tensor | None = None
    children: dict[int, _Place] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of an emitted token under the target's own logits."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # likeliest tokens and their log-probabilities


class LogprobRecorder:
    """A `StatefulProcessor` that changes nothing and records the logits of every node; one object serves one row."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._root = _Place()

    def start(self, prompt: Sequence[int]) -> _Place:
        return self._root

    def advance(self, state: _Place, token: int) -> _Place:
        return state.children.setdefault(token, _Place())

    def scores(self, state: _Place, scores: Tensor) -> Tensor:
        state.logits = scores.clone()
        return scores

    def pop(self, tokens: Sequence[int]) -> list[TokenLogprob]:
        """Return the log-probabilities of tokens emitted since the last call, and forget their siblings."""
        logged = []
        for token in tokens:
            place = self._root
            self._root = self.advance(place, token)
            if place.logits is None:  # a lossy rule went where plain decoding cannot go
                logged.append(TokenLogprob(token, UNKNOWN_LOGPROB, ()))
                continue
            logprobs = torch.log_softmax(place.logits.float(), -1)
            values, ids = logprobs.topk(min(self._count, len(logprobs)))
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
            logged.append(TokenLogprob(token, float(logprobs[token]), top))
        return logged


class _Region(NamedTuple):
    """Part of an answer that a node of a draft tree is in."""

    ids: tuple[int, ...] = ()  # its last ones
    length: int = -1  # tokens of the thought; -1 outside
    begins: bool = False  # whether a thought can begin here


class ThoughtBudget:
    """A `StatefulProcessor` that writes the closing mark of a thought once it has had a number of tokens.

    Thoughts begin where `ReplyParser` finds them: first in an answer, or behind a call. The mark waits for a processor
    before this one that does not allow it yet, as a grammar within a character.
    """

    def __init__(self, replies: ReplyFormat, budget: int, begun: str, hidden: frozenset[int]) -> None:
        begin, end = replies.thought or ("", "")
        self._tokenizer, self._budget, self._hidden = replies.tokenizer, budget, hidden
        self._begin, self._end, self._call = begin.strip(), end.strip(), replies.syntax.end.strip()
        self._mark = tuple(self._tokenizer.encode(self._end, add_special_tokens=False))
        self._span = max(map(len, (self._begin, self._end, self._call)))  # tokens that can be part of a mark
        self._first = _Region(length=0) if replies.opened(begun) else _Region(begins=True)

    def start(self, prompt: Sequence[int]) -> _Region:
        return self._first

    def advance(self, state: _Region, token: int) -> _Region:
        ids = state.ids if token in self._hidden else (*state.ids, token)[-self._span :]
        text = self._tokenizer.decode(ids).strip()
        if state.length >= 0:
            return _Region() if self._end in text else _Region(ids, state.length + 1)
        if state.begins and text.startswith(self._begin):
            return _Region(length=0)
        if (state.begins and not text) or (self._call and self._call in text):
            return _Region(begins=True)
        return _Region(ids, begins=state.begins and self._begin.startswith(text))

    def scores(self, state: _Region, scores: Tensor) -> Tensor:
        if state.length < self._budget:
            return scores
        ids, mark = state.ids, self._mark
        written = next(n for n in range(len(mark) - 1, -1, -1) if ids[len(ids) - n :] == mark[:n])
        only = torch.full_like(scores, float("-inf"))
        only[mark[written]] = scores[mark[written]]
        return only if only.max().isfinite() else scores


@dataclass(frozen=True, slots=True)
class Planned:
    plan: RowPlan
    recorder: LogprobRecorder | None  # of its log-probabilities; None without
    begun: str  # text of the answer that the prompt has


class Planner:
    def __init__(self, vlm: VLM, limits: Limits) -> None:
        self._vlm, self._default, self._most = vlm, limits.default_max_tokens, limits.max_tokens
        self.context = vlm.target.traits.limits.context  # tokens; None without a limit
        self._tokenizer = vlm.processor.tokenizer
        template = vlm.processor.chat_template or getattr(self._tokenizer, "chat_template", None)
        texts = template.values() if isinstance(template, dict) else [template or ""]
        self.replies = ReplyFormat(self._tokenizer, "\n".join(texts))
        self._compiled = lru_cache(MOST_SCHEMAS)(self._compile)

    def plan(self, body: AnyRequest, prompt: Prompt, begun: str) -> Planned:
        (row,) = plan_rows(self._vlm.target, [prompt], tokenizer=self._tokenizer, **self.options(body, prompt, begun))
        recorder = None
        if body.num_logprobs is not None:
            recorder = LogprobRecorder(body.num_logprobs)
            row = replace(row, processors=(recorder, *row.processors))
        return Planned(row, recorder, begun)

    def options(self, body: AnyRequest, prompt: Prompt, begun: str) -> dict[str, Any]:
        """Return a request's options under the names of `saccade.stream.GenerationOptions`."""
        limit = self._limit(body, len(prompt))
        options: dict[str, Any] = {"max_new_tokens": limit, **self._sampling(body)}
        if body.min_tokens:
            if body.min_tokens > limit:
                raise invalid(f"min_tokens is {body.min_tokens}, above max_tokens of {limit}; lower it.", "min_tokens")
            options["min_new_tokens"] = body.min_tokens
        if body.repetition_penalty is not None:
            options["repetition_penalty"] = body.repetition_penalty
        size = self._vlm.target.vocab_size
        for name in body.logit_bias:
            if not name.isascii() or not name.isdigit() or len(name) > 9 or int(name) >= size:
                raise invalid(f"logit_bias: {name[:40]!r} is no token id below {size}.", "logit_bias")
        if body.logit_bias:
            options["sequence_bias"] = {(int(name),): float(value) for name, value in body.logit_bias.items()}
        processors: list[Any] = []
        if body.presence_penalty or body.frequency_penalty:
            processors.append(Penalties(len(prompt), body.presence_penalty, body.frequency_penalty))
        ends = set(body.stop_token_ids)
        if any(end >= size for end in ends):
            raise invalid(f"stop_token_ids: {max(ends)} is no token id below {size}.", "stop_token_ids")
        grammar = self._grammar(body, begun)
        if grammar is not None:
            processors.append(grammar)
        if isinstance(body, ChatRequest) and body.thinking_token_budget >= 0:
            if self.replies.thought is None:
                raise invalid(
                    "thinking_token_budget: this model writes no thoughts, or its marks are unknown; leave it out.",
                    "thinking_token_budget",
                )
            hidden = self.parser(body, begun)[1]
            processors.append(ThoughtBudget(self.replies, body.thinking_token_budget, begun, hidden))
        if ends or body.ignore_eos:
            known = () if body.ignore_eos else ends_of(self._vlm.target.model, self._tokenizer)
            options["eos_token_id"] = sorted(ends.union(known))
        if processors:
            options["logits_processor"] = processors
        if stops := stops_of(body):
            parts = (len(prompt), len(prompt) + body.min_tokens, *self.parser(body, begun))
            options["stopping_criteria"] = [StopText(self._tokenizer, stops, *parts)]
        return options

    def parser(self, body: AnyRequest, begun: str) -> tuple[ReplyParser | None, frozenset[int]]:
        """Parser of an answer, None where all of it is content, and ids of tokens without a text."""
        policy, parser = policy_of(body), None
        hidden = frozenset(() if body.structures or policy.has_grammar else body.stop_token_ids)  # text in a grammar
        if isinstance(body, ChatRequest):
            parser = self.replies.parser(policy, begun)
        return parser, hidden | self.replies.dropped if parser else hidden

    def _grammar(self, body: AnyRequest, begun: str) -> Rollback | None:
        """Return the processor of what an answer may be; None where it may be anything."""
        policy, structure = policy_of(body), next(iter(body.structures), None)
        if structure is None and not policy.has_grammar:
            return None
        thinks = isinstance(body, ChatRequest) and self.replies.thought is not None
        is_whole = structure is not None and not policy.functions and not thinks  # of the answer
        if structure is not None and structure.kind == "grammar":
            if not is_whole:
                raise invalid(
                    "A grammar constrains the whole answer, which leaves no place for reasoning or tools; give a "
                    "schema, a regex or a choice.",
                    "structured_outputs",
                )
            return self._compiled(structure.value)
        if structure is not None and structure.kind == "json" and is_whole:
            schema = structure.value  # unsorted: answers follow the properties' order
            return self._compiled(schema if isinstance(schema, str) else json.dumps(schema), structure.whitespace)
        form = None if structure is None else partial(structure_rule, structure)
        return self._compiled(self.replies.grammar(policy, begun, form, thinks))

    def _compile(self, text: str, whitespace: bool | None = None) -> Rollback:
        """Compile a grammar, or a schema, whose JSON may or may not have white space."""
        if len(text) > MOST_SCHEMA_BYTES:
            raise invalid(f"The schema is longer than {MOST_SCHEMA_BYTES} bytes; shorten it.", "response_format")
        size = self._vlm.target.vocab_size
        if whitespace is None:
            return lark(text, self._tokenizer, size)
        return json_schema(text, self._tokenizer, size, whitespace=whitespace)

    def _limit(self, body: AnyRequest, prompt_length: int) -> int:
        if body.max_tokens is not None:
            if self._most is not None and body.max_tokens > self._most:
                raise invalid(f"This server answers with at most {self._most} tokens; lower max_tokens.", "max_tokens")
            return body.max_tokens
        most = min(self._default, self._most or self._default)
        return most if self.context is None else max(min(most, self.context - prompt_length), 1)

    def _sampling(self, body: AnyRequest) -> dict[str, Any]:
        """Greedy decoding at temperature 0; sampling with any other sampling field; else the checkpoint's own."""
        defaults = self._vlm.target.model.generation_config
        if body.temperature is not None and body.temperature < GREEDY_BELOW:
            return {"do_sample": False}
        fields = ("temperature", "top_p", "top_k", "min_p")
        options = {name: value for name in fields if (value := getattr(body, name)) is not None}
        if options.get("top_k") == -1:
            options["top_k"] = 0
        if not options and not defaults.do_sample:
            return {"do_sample": False}
        if defaults.top_k is None:
            options.setdefault("top_k", 0)  # no limit, in place of `generate`'s silent 50
        return {"do_sample": True, **options}
