"""Answers in OpenAI's form: text up to a stop string, log-probabilities, usage, chunks and whole bodies."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

from torch import Tensor

from saccade.output import Output, TreeTrace
from saccade.serve.owner import FINISHED, Event, accepted_per_pass
from saccade.serve.refusals import DONE, Json, Refusal
from saccade.serve.replies import Reply, ReplyParser
from saccade.serve.schemas import StreamOptions
from saccade.stream import Detokenizer, TokenTexts


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
        """Whether the content in the ids ``[1, S]`` after the prompt contains a stop string."""
        new = ids[0, self._read :].tolist()
        text = self._text.add([token for token in new if token not in self._hidden])
        if self._parser is not None:
            text = self._parser.add(text).content
        self._cutter.add(text, counts=ids.shape[1] > self._minimum)
        self._read = ids.shape[1]
        return self._cutter.stopped


@dataclass(frozen=True, slots=True)
class Piece:
    text: str  # completed characters
    logprobs: Json | None  # of its tokens in the endpoint's form; None without
    trace: Json | None  # tokens with marks, and the tree; None unless traced
    finish: str | None  # OpenAI's finish reason; None before the end
    reasoning: str = ""  # completed characters of what the model says to itself
    calls: tuple[Json, ...] = ()  # parts of tool calls, as in chunks of chat answers


@dataclass(eq=False)
class Choice:
    """One answer under way, from tokens to text."""

    tokenizer: Any  # the target's
    stops: Sequence[str]  # stop strings
    chat: bool  # whether log-probabilities are in the form of chat answers
    num_logprobs: int | None  # alternatives per token; None: no log-probabilities
    traced: bool  # whether pieces have traces
    text: str = ""  # so far
    count: int = 0  # tokens so far
    output: Output | None = None  # of the engine at the end
    finish: str | None = None
    logprobs: Json = field(default_factory=dict)
    steps: list[Json] = field(default_factory=list)  # traces so far
    reasoning: str = ""  # so far
    reasoning_tokens: int = 0  # so far
    calls: list[Json] = field(default_factory=list)  # whole tool calls, as in chat answers
    parser: ReplyParser | None = None  # that divides the text; None where all of it is content
    hidden: frozenset[int] = frozenset()  # ids of tokens without a text
    minimum: int = 0  # tokens up to which no stop string ends it

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer, special=self.parser is not None)
        self._cutter = StopCutter(self.stops)
        self._offset = 0

    @cached_property
    def _words(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._cutter.stop

    @property
    def message(self) -> Json:
        """The whole of it as a message of a chat."""
        message: Json = {"role": "assistant", "content": self.text}
        if self.calls:
            message.update(content=self.text or None, tool_calls=self.calls)
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message

    def add(self, event: Event) -> Piece:
        by_token = bool(self.traced or self.parser is not None or self.minimum)
        by_token |= self.num_logprobs is not None and not self.chat
        shown = [[token] * (token not in self.hidden) for token in event.tokens]
        texts = [self._detokenizer.add(part) for part in (shown if by_token else [list(chain.from_iterable(shown))])]
        self.count += len(event.tokens)
        end = ""
        if event.output is not None:
            end = self._detokenizer.finish()
            self.output = event.output
            self.finish = FINISHED.get(event.output.finish_reason, "stop")
        reply = self._divide([*texts, end], (self.finish or "stop") if event.is_last else None)
        if event.is_last and self._cutter.stopped:
            self.finish = "stop"
        self.text += reply.content
        self.reasoning += reply.reasoning
        self._collect(reply.calls)
        if self.calls and self.finish == "stop":
            self.finish = "tool_calls"
        trace = None
        if self.traced:
            if texts:
                texts[-1] += end
            about = zip(event.tokens, texts, event.marks, strict=True)
            tokens = [{"id": token, "text": text, "mark": mark} for token, text, mark in about]
            trace = {"tokens": tokens, "tree": None if event.tree is None else self._tree(event.tree)}
            self.steps.append(trace)
        logprobs = self._new_logprobs(event, texts)
        return Piece(reply.content, logprobs, trace, self.finish, reply.reasoning, tuple(reply.calls))

    def _divide(self, texts: Sequence[str], finish: str | None) -> Reply:
        """Divide the texts of tokens, and of the end, and cut the content at a stop string."""
        whole = Reply()
        for place, text in enumerate(texts, 1 - len(texts)):
            counts, end = self.count + place >= self.minimum, None if place else finish
            if self.parser is None:
                whole.content += self._cutter.add(text, end is not None, counts)
                continue
            if self._cutter.stopped:
                break
            thought = self.parser.in_reasoning
            reply = self.parser.add(text, end)
            self.reasoning_tokens += bool(place) and (thought or self.parser.in_reasoning)
            whole.content += self._cutter.add(reply.content, bool(end or reply.calls), counts)
            whole.reasoning += reply.reasoning
            whole.calls += reply.calls
        return whole

    def _collect(self, parts: Sequence[Json]) -> None:
        """Join parts of calls to whole ones."""
        for part in parts:
            if "id" in part:
                about = {name: part[name] for name in ("id", "type")}
                self.calls.append({**about, "function": dict(part["function"])})
            else:
                self.calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]

    def _new_logprobs(self, event: Event, texts: Sequence[str]) -> Json | None:
        """Log-probabilities of the tokens but the one that ended the answer without any text."""
        if self.num_logprobs is None:
            return None
        ended = event.output is not None and event.output.finish_reason == "eos"
        entries = event.logprobs[:-1] if ended else event.logprobs
        new: Json
        if self.chat:
            content = []
            for entry in entries:
                top = [self._token(token, value) for token, value in entry.top]
                content.append({**self._token(entry.token, entry.logprob), "top_logprobs": top})
            new = {"content": content, "refusal": None}
        else:
            word = self._words.text
            *offsets, self._offset = accumulate(map(len, texts[: len(entries)]), initial=self._offset)
            new = {
                "tokens": [word(entry.token) for entry in entries],
                "token_logprobs": [entry.logprob for entry in entries],
                "top_logprobs": [{word(token): value for token, value in entry.top} for entry in entries],
                "text_offset": offsets,
            }
        for name, values in new.items():
            if values is not None:
                self.logprobs.setdefault(name, []).extend(values)
        return new

    def _token(self, token: int, logprob: float) -> Json:
        return {"token": self._words.text(token), "logprob": logprob, "bytes": list(self._words.utf8(token))}

    def _tree(self, tree: TreeTrace) -> Json:
        nodes = [{"id": token, "text": self._words.text(token)} for token in tree.tokens]
        return {"tokens": nodes, "parents": list(tree.parents), "path": list(tree.path)}


def usage(choices: Sequence[Choice], per_prompt: int) -> Json:
    stats = [choice.output.stats for choice in choices if choice.output is not None]
    prompts = [c.output.stats for c in choices[::per_prompt] if c.output is not None]
    prompt, new = sum(s.prompt_tokens for s in prompts), sum(s.new_tokens for s in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(s.reused_tokens for s in prompts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(s.accepted_prediction_tokens for s in stats),
            "rejected_prediction_tokens": sum(s.rejected_prediction_tokens for s in stats),
            "reasoning_tokens": sum(choice.reasoning_tokens for choice in choices),
        },
    }


def metrics(choices: Sequence[Choice]) -> Json:
    """vLLM's ``metrics.speculative_decoding`` of a request with one choice; empty without draft tokens."""
    output = choices[0].output
    if len(choices) > 1 or output is None or not output.stats.draft_passes:
        return {}
    steps, drafted, passes = output.stats.draft_passes, output.stats.drafted_tokens, accepted_per_pass(output.marks)
    most, accepted = max(passes, default=0), sum(passes)
    return {
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": 1 + accepted / steps,
                "draft_acceptance_rate": accepted / drafted,
                "acceptance_histogram": [steps - len(passes), *(passes.count(n + 1) for n in range(most))],
                "num_spec_steps": steps,
                "num_accepted_draft_tokens": accepted,
                "num_draft_tokens": drafted,
                "num_spec_tokens": most,
            }
        }
    }


class Form:
    def __init__(self, chat: bool, model: str, options: StreamOptions) -> None:
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._chat, self._options = chat, options
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": self.id, "object": kind, "created": int(time.time()), "model": model}
        self._chunk_head = json.dumps({**self._head, "object": "chat.completion.chunk" if chat else kind})[:-1]

    def begin(self, index: int, echo: str) -> bytes:
        """A choice's first chunk: the role, or for raw completions nothing, and the text that is continued."""
        if self._chat:
            delta = json.dumps({"role": "assistant", "content": echo})
            return self._chunk(f'{{"index": {index}, "delta": {delta}, "finish_reason": null}}')
        text = f'"text": {json.dumps(echo)}, "logprobs": null, "finish_reason": null'
        return self._chunk(f'{{"index": {index}, {text}}}') if echo else b""

    def chunk(self, index: int, piece: Piece, stats: Json | None, used: tuple[int, int]) -> bytes:
        """A piece of a choice as a server-sent event, with the tokens of prompt and answer so far.

        Written by hand, because every step of every row makes one.
        """
        text = json.dumps(piece.text)
        content = f'"delta": {{"content": {text}}}' if self._chat else f'"text": {text}'
        if self._chat and (piece.reasoning or piece.calls or (piece.finish is not None and not piece.text)):
            parts = {"reasoning_content": piece.reasoning, "content": piece.text, "tool_calls": piece.calls}
            content = f'"delta": {json.dumps({name: part for name, part in parts.items() if part})}'
        finish = "null" if piece.finish is None else f'"{piece.finish}"'
        logprobs = "null" if piece.logprobs is None else json.dumps(piece.logprobs)
        choice = f'{{"index": {index}, {content}, "logprobs": {logprobs}, "finish_reason": {finish}}}'
        details = {**(piece.trace or {}), **({} if stats is None else {"stats": stats})}
        return self._chunk(choice, f', "saccade": {json.dumps({"index": index, **details})}' if details else "", used)

    def end(self, choices: Sequence[Choice], used: Json, details: Sequence[Json] = ()) -> bytes:
        """The end of a stream, after a chunk of the usage where it was requested; details are in earlier chunks."""
        if not self._options.include_usage:
            return DONE
        end = json.dumps({"choices": [], "usage": used, **metrics(choices)})
        return f"data: {self._chunk_head}, {end[1:]}\n\n".encode() + DONE

    def broken(self, refusal: Refusal) -> bytes:
        """The end of a stream that fails."""
        return refusal.event()

    def body(self, choices: Sequence[Choice], used: Json, details: Sequence[Json]) -> bytes:
        whole = [self._whole(index, choice) for index, choice in enumerate(choices)]
        more = {**metrics(choices), **({"saccade": {"choices": details}} if details else {})}
        return json.dumps({**self._head, "choices": whole, "usage": used, **more}).encode()

    def _whole(self, index: int, choice: Choice) -> Json:
        logprobs: Json | None = None
        if choice.num_logprobs is not None:
            logprobs = {**choice.logprobs, **({"refusal": None} if self._chat else {})}
        content = {"message": {**choice.message, "refusal": None}} if self._chat else {"text": choice.text}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": choice.finish}

    def _chunk(self, choice: str, more: str = "", used: tuple[int, int] | None = None) -> bytes:
        counts = "null"
        if used is not None and self._options.continuous_usage_stats:
            prompt, new = used
            counts = f'{{"prompt_tokens": {prompt}, "completion_tokens": {new}, "total_tokens": {prompt + new}}}'
        usage_ = f', "usage": {counts}' if self._options.include_usage else ""
        return f'data: {self._chunk_head}, "choices": [{choice}]{usage_}{more}}}\n\n'.encode()
