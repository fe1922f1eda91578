"""Answers divided into reasoning, calls and content as they grow.

Regions are found by transformers' `ResponseParser`. It ends a call at the first closing mark, be it in a string, so
that brackets and strings of a call are followed here, and it sees no mark within.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic_core import from_json
from transformers.utils.chat_parsing import ResponseParser

from saccade.serve.refusals import Json

CLOSING = {"{": "}", "[": "]"}
END, MASK = "\ufdd0", "\ufdd1"  # noncharacters: after a text, and in place of marks in strings of calls
_CONTROL = re.compile(r"[\x00-\x1f]")
_PLAIN = re.compile(r'(?:[^"\\]|\\["\\/bfnrt])*')  # of a string of JSON, whatever is before it


@dataclass
class Reply:
    """What a piece of text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Json] = field(default_factory=list)  # parts of calls, as in chunks of chat answers


@dataclass(frozen=True)
class CallText:
    """How calls are written around what the parser gives of them."""

    begin: str = ""  # in front, with NAME for that of the function
    end: str = ""  # after
    head: re.Pattern[str] | None = None  # up to the arguments, where these are JSON


class ReplyParser:
    """Divider of an answer's text into reasoning, calls and content, as it grows."""

    def __init__(
        self, template: Json, prefix: str, tools: Sequence[Json], parallel: bool, form: CallText | None = None
    ) -> None:
        self._again = partial(ReplyParser, template, "", tools, parallel, form)
        self._parser = ResponseParser(template, prefix=prefix, tools=list(tools))
        self._parallel, self._form = parallel, form or CallText()
        self._region = template["fields"].get("tool_calls", {})
        ends = self._region.get("close", self._form.begin)  # of a call
        ends = [ends] if isinstance(ends, str) else ends
        self._masks = {end: chr(ord(MASK) + number) for number, end in enumerate(filter(None, ends))}
        self._call = _Call()
        self._unread = ""  # text within brackets of a call, before the parser has it
        self._failed = False  # whether the text is no longer divided, as transformers cannot read it
        self._count = 0  # calls so far
        self._thought = ""  # the last one so far
        self._place = "content"  # region that the text so far ends in
        self._finish: str | None = None  # of the answer, once nothing follows
        self.has_answered = False  # whether there is any content or call
        self._take(self._parser.initial_events, Reply())
        self._thought, self.has_answered = "", False

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends in it."""
        return self._place not in ("content", "tool_calls")

    def add(self, text: str, finish: str | None = None) -> Reply:
        """Append text and return what it adds; with a finish reason nothing follows.

        A thought that the model itself ends without its closing mark is the answer, too.
        """
        reply = Reply()
        while text and not self._failed:
            text = self._read(text, reply)
        reply.content += text
        if finish is not None:
            self._end(finish, reply)
        return reply

    def _end(self, finish: str, reply: Reply) -> None:
        if self._failed:
            return
        if self._unread:
            self._pass_on(reply)
        if self.in_reasoning or finish == "length":
            self._feed(END, reply)  # after which a mark at the end of the text is seen as one
        thinks, self._finish = self.in_reasoning, finish
        try:
            events = [] if self._failed else self._parser.finalize()[1]
        except (ValueError, KeyError):
            reply.content += self._call.text
        else:
            self._take(events, reply)
        reply.content = reply.content.replace(END, "")
        reply.reasoning = reply.reasoning.replace(END, "")
        if thinks and finish == "stop" and not self.has_answered:
            answer = self._again().add(self._thought.replace(END, ""), finish)
            reply.content, reply.calls = answer.content, answer.calls

    def _read(self, text: str, reply: Reply) -> str:
        """Read the first part of a text, up to a bracket that begins or ends a call, and return the rest."""
        if not self._call.is_open():
            part, bracket, rest = text.partition("{" if self._region else text)
            self._feed(part + bracket, reply)
            return rest
        rest = self._call.add(text)
        self._grow(*self._call.grown(), reply)
        self._unread += text
        if not self._call.is_open():
            self._unread = self._unread.removesuffix(rest)
            self._pass_on(reply)
        return rest

    def _pass_on(self, reply: Reply) -> None:
        """Feed the text within a call's brackets without marks that would end it."""
        text, self._unread = self._unread, ""
        for mark, mask in self._masks.items():
            text = text.replace(mark, mask)
        self._feed(text, reply, is_known=True)

    def _feed(self, text: str, reply: Reply, is_known: bool = False) -> None:
        try:
            events = self._parser.feed(text)
        except (ValueError, KeyError):  # a call that is none
            self._failed = True
            reply.content += self._call.text + ("" if is_known else text)
            return
        self._take(events, reply, is_known)

    def _unmasked(self, value: Any) -> Any:
        """A value that the parser has made of a call, with the marks in its strings."""
        text = json.dumps(value, ensure_ascii=False).replace(END, "")
        for mark, mask in self._masks.items():
            text = text.replace(mask, json.dumps(mark)[1:-1])
        return json.loads(text)

    @property
    def _quote(self) -> str:
        """What is around strings of calls; empty where nothing is."""
        if self._region.get("content") not in ("json", "text"):
            return ""
        delimiters = self._region.get("content_args", {}).get("string_delims")
        return str(delimiters[0][0]) if delimiters else '"'

    def _take(self, events: Iterable[Json], reply: Reply, is_known: bool = False) -> None:
        """Add what the parser has found; ``is_known``: the text of the call has been read."""
        for event in events:
            kind, region, text = event["type"], event["field"], event.get("text", "")
            self._place = "content" if kind == "region_close" else region
            if region == "content":
                reply.content += text
                self.has_answered = self.has_answered or bool(text.strip())
            elif region != "tool_calls":  # which has several names in templates
                self._thought = "" if kind == "region_open" else self._thought + text
                reply.reasoning += text
            elif kind == "region_open":
                self._call = _Call(self._quote, self._form.head, [*self._masks])
            elif kind == "region_close":
                self._close(event["value"], reply)
            elif not is_known and not self._call.is_open():
                while text:
                    text = self._call.add(text)
                self._grow(*self._call.grown(), reply)

    def _close(self, value: Any, reply: Reply) -> None:
        """End a call; one that is none is text, and so is one that is cut before its arguments can be read."""
        call, self._call = self._call, _Call()
        name, arguments = call.close()
        self._grow(name, arguments, reply)
        is_cut, calls = self._finish == "length", list[tuple[str, str]]()
        if not call.given and not (is_cut and self._region.keys() & {"close", "close_pattern"}):
            calls = list(_whole(self._unmasked(value)))
        for name, arguments in calls:
            self._grow(name, arguments, reply)
        if not calls and not (call.given and (is_cut or call.is_whole)):
            named = value["function"]["name"] if isinstance(value, dict) and "function" in value else ""
            reply.content += self._form.begin.replace("NAME", named)
            reply.content += call.text
            reply.content += "" if self._finish else self._form.end

    def _grow(self, name: str, arguments: str, reply: Reply) -> None:
        """Add a part of a call; one with a name begins the next call."""
        self._count += bool(name)
        if self._count > 1 and not self._parallel:
            return
        place = {"index": self._count - 1}
        if name:
            self.has_answered = True
            about = {"id": uuid.uuid4().hex[:9], "type": "function"}  # the only length that Mistral's templates take
            reply.calls.append({**place, **about, "function": {"name": name, "arguments": arguments}})
        elif arguments:
            reply.calls.append({**place, "function": {"arguments": arguments}})


def _whole(value: Any) -> Iterator[tuple[str, str]]:
    """Names and arguments of calls from a region's parsed value or text."""
    value = _parsed(value)
    for call in value if isinstance(value, list) else [value]:
        if not isinstance(call, dict):
            continue
        function = call.get("function", call)
        arguments = _parsed(function.get("arguments", function.get("parameters")))
        name = function.get("name")
        if name and isinstance(name, str) and isinstance(arguments, dict | None):
            yield name, json.dumps(arguments or {})


def _parsed(value: Any) -> Any:
    """Value of a text that is JSON, line breaks in strings included."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value, strict=False)
    return value


class _Call:
    """Reader of one call as it grows: its brackets and strings, its name, then the pieces of its arguments."""

    def __init__(self, quote: str = "", head: re.Pattern[str] | None = None, marks: Sequence[str] = ()) -> None:
        self._quote, self._head, self._marks = quote, head, marks
        outside = [re.escape(quote), r"[{}\[\],]", *map(re.escape, marks)]
        inside = [re.escape(quote)]
        if quote == '"':
            inside.append(r"\\(?:u.{4}|[^u])")  # an escaped sign
        self._signs = [re.compile("|".join(signs), re.DOTALL) for signs in (outside, inside)]
        self._held = [max(map(len, (quote, *marks)), default=1) - 1, len(quote) - 1]  # that may begin a sign
        self._text, self._rest = "", ""  # read, and to be read
        self._open: list[str] = []  # what closes the brackets and the string that are open
        self._arguments, self.given = "", 0  # their text, and how much of it can be closed
        self._taken = 0  # of that, what has been returned
        self._depth, self._closers = 0, ""  # brackets around them, and what closes those within
        self._name, self._has_ended = "", False

    @property
    def text(self) -> str:
        return self._text + self._rest

    def is_open(self) -> bool:
        """Whether a bracket is open."""
        return bool(self._open) and not self._has_ended

    @property
    def is_whole(self) -> bool:
        """Whether all arguments can be closed."""
        return self.given == len(self._arguments)

    def add(self, text: str) -> str:
        """Append text, and return what is after the bracket that ends it."""
        if not self._quote or self._has_ended:
            self._text += text
            return ""
        self._rest += text
        while True:
            inside = self._open[-1:] == [self._quote]
            match = self._signs[inside].search(self._rest)
            if match is None:
                held = max(len(self._rest) - self._held[inside], 0)
                escape = self._rest.find("\\") if inside else -1
                self._move(held if escape < 0 else min(held, escape), inside)
                return ""
            self._move(match.start(), inside)
            if not inside and match[0] in self._marks and self._open:
                self._has_ended = True
            else:
                self._move(len(match[0]), inside)
                self._turn(match[0], inside)
            if not self.is_open():
                rest, self._rest = self._rest, ""
                return rest

    def _move(self, end: int, inside: bool) -> None:
        """Go on to a place of the text, and see how much of the arguments can be closed."""
        part, self._rest = self._rest[:end], self._rest[end:]
        self._text += part
        if not self._name or self._has_ended or not part:
            return
        goes_on = inside and self.is_whole and _PLAIN.fullmatch(part)  # as closable as what is before it
        self._arguments += _CONTROL.sub(_escaped, part) if inside else part
        if goes_on:
            self.given = len(self._arguments)
        else:
            self._see()

    def _turn(self, sign: str, inside: bool) -> None:
        """Open or close a bracket or a string."""
        if inside:
            if sign == self._quote:
                self._open.pop()
            return
        if not self._open and sign != "{":
            return
        if sign == self._quote:
            self._open.append(sign)
        elif sign in CLOSING:
            head = self._head if sign == "{" and not self._name else None
            match = head.fullmatch(self._text[:-1]) if head else None
            if match:
                self._name, self._depth = match["name"], len(self._open)
                self._arguments = sign
            self._open.append(CLOSING[sign])
        elif self._open[-1] == sign:
            self._open.pop()
        if self._name and len(self._open) == self._depth:
            self._has_ended = True
        if self._name:
            self._see()

    def _see(self) -> None:
        closers = "".join(reversed(self._open[self._depth :]))
        if self._arguments.rstrip() != "{" and _is_json(self._arguments + closers):
            self.given, self._closers = len(self._arguments), closers

    def grown(self) -> tuple[str, str]:
        """The name once it is known, and what is new of the arguments, as far as they can be closed as JSON."""
        name = self._name if self.given and not self._taken else ""
        news = self._arguments[self._taken : self.given]
        self._taken = self.given
        return name, news

    def close(self) -> tuple[str, str]:
        """The name if it is new, and what is left of the arguments, closed."""
        self._move(len(self._rest), self._open[-1:] == [self._quote])
        if not self.given and self._arguments and _is_json(self._arguments, is_cut=True):
            self.given, self._closers = 1, "}"
        name, news = self.grown()
        return name, news + self._closers


def _escaped(sign: re.Match[str]) -> str:
    return json.dumps(sign[0])[1:-1]


def _is_json(text: str, is_cut: bool = False) -> bool:
    try:
        from_json(text, allow_inf_nan=False, allow_partial="trailing-strings" if is_cut else False)
    except ValueError:
        return False
    return True
