"""Tool calls and reasoning of chat models: their syntaxes, prompts, grammars, and the regions of answers.

Regions (reasoning, calls, content) are those of the tokenizer's own response template where it has one, else of the
table of this file. Forced calls follow a grammar in the same syntax.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from saccade.grammar import MOST_BLANKS
from saccade.schema import SILENT, enforceable
from saccade.serve.refusals import Json, invalid
from saccade.serve.replies import CallText, ReplyParser
from saccade.serve.schemas import CallPolicy, Function, Structure

ANY = r"/(.|\n)*/"  # text in a grammar, which contains no token that was added to the vocabulary
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Spaces in the JSON of calls, as chat templates write it."""


class Rules:
    """Rules of a grammar in llguidance's Lark; a token that was added to the vocabulary is never written as text."""

    def __init__(self, tokenizer: Any) -> None:
        tokens = tokenizer.added_tokens_decoder.items()
        self._added = {token.content: number for number, token in tokens if token.content.strip()}
        names = sorted(self._added, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")
        self._rules: dict[str, str] = {}

    def literal(self, text: str) -> str:
        parts = filter(None, self._pattern.split(text))
        return " ".join(f"<[{self._added[part]}]>" if part in self._added else json.dumps(part) for part in parts)

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self._rules)}"
        self._rules[f"{name}{attributes}"] = body
        return name

    def start(self, body: str) -> str:
        """Return the whole grammar, which begins with this rule."""
        return "\n".join([f"start: {body}", *(f"{name}: {rule}" for name, rule in self._rules.items())])

    def json(self, schema: str | Json, form: Json = SPACED) -> str:
        return self.rule(f"%json {json.dumps({**enforceable(schema), 'x-guidance': form})}")

    def until(self, end: str) -> str:
        """Any text, and its end."""
        if end in self._added:
            return f"{self.rule(ANY)} {self.literal(end)}"
        return self.rule(f"/(.|\\n)*{_escaped(end)}/", "[lazy]")

    def without(self, word: str) -> str:
        """Any text that lacks a word."""
        self._rules["WITHOUT"] = ANY if word in self._added else rf"{ANY} & ~/(.|\n)*{_escaped(word)}(.|\n)*/"
        return "WITHOUT"

    def members(self, members: Sequence[tuple[str, bool]], comma: str = "") -> str:
        """Members of an object in order, each with whether it is required."""
        between = f"{json.dumps(comma)} " if comma else ""
        rest, ways = self.rule('""'), list[str]()
        for body, required in reversed(members):
            ways = [*([] if required else ways), f"{body} {rest}"]
            rest = self.rule(f"{between}{body} {rest}" if required else f"({between}{body})? {rest}")
        if not any(required for _, required in members):
            ways.append('""')
        return self.rule(" | ".join(ways))


def structure_rule(structure: Structure, rules: Rules) -> str:
    """Grammar of an answer that has a form."""
    value = structure.value
    if structure.kind == "json":
        blanks = {"whitespace_pattern": rf"[ \n]{{0,{MOST_BLANKS}}}"} if structure.whitespace else {}
        return rules.json(value, {"whitespace_flexible": structure.whitespace, **blanks})
    if structure.kind == "regex":
        return rules.rule("/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", value) + "/")
    return rules.rule(" | ".join(map(rules.literal, value)))


def _escaped(text: str) -> str:
    """A text as a regular expression."""
    return re.sub(r"[^\w\s]", lambda sign: f"\\x{ord(sign[0]):02X}", text).replace("\n", "\\n")


def _only(schema: Json, *keywords: str) -> None:
    """Refuse a schema with other keywords, which a call that is not written as JSON would not follow."""
    others = sorted(name for name in schema.keys() - SILENT - {*keywords} if not name.startswith("x-"))
    if others:
        raise invalid(
            f"tools: calls of this model cannot be forced to follow {others[0]} in {json.dumps(dict(schema))[:100]}; "
            "change the parameter, or leave tool_choice and strict out.",
            "tools",
        )


def _properties(schema: Json) -> Iterator[tuple[str, Json, bool]]:
    """Name, schema and whether it is required, of the properties of an object."""
    required = schema.get("required", ())
    is_named = set(required) <= set(schema.get("properties") or ())
    _only(schema, "properties", "additionalProperties", *(["required"] if is_named else []))
    shared: Json = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for name, each in (schema.get("properties") or {}).items():
        yield name, {**shared, **(each if isinstance(each, Mapping) else {})}, name in required


def _json(before: str, after: str = "") -> Callable[[Rules, Function], str]:
    """Arguments as JSON, with what is in front of them (NAME: that of the function), and after."""

    def body(rules: Rules, function: Function) -> str:
        begin = rules.literal(before.replace("NAME", function.name))
        return f"{begin} {rules.json(function.arguments)} {rules.literal(after)}"

    return body


def _elements(head: str, key: str, close: str, tail: str) -> Callable[[Rules, Function], str]:
    """Arguments as elements of their own, text without quotes; NAME is that of the function, or of an argument."""

    def body(rules: Rules, function: Function) -> str:
        members = []
        line, end = rules.literal("\n"), f"{close}\n"
        for name, schema, required in _properties(function.arguments):
            begin = rules.literal(key.replace("NAME", name))
            if schema.get("enum") and all(isinstance(value, str) for value in schema["enum"]):
                _only(schema, "enum")
                value = f"({' | '.join(rules.literal(each + end) for each in schema['enum'])})"
            elif schema.get("type") == "string":
                _only(schema)
                value = f"{rules.until(close)} {line}"
            else:
                value = f"{rules.json(schema)} {rules.literal(end)}"
            members.append((f"{begin} {value}", required))
        begin = rules.literal(head.replace("NAME", function.name))
        return f"{begin} {rules.members(members)} {rules.literal(tail)}"

    return body


QUOTE = '<|"|>'


def _gemma(rules: Rules, function: Function) -> str:
    return f"{rules.literal(f'call:{function.name}')} {_gemma_value(rules, function.arguments)}"


def _gemma_value(rules: Rules, schema: Json) -> str:
    """A value in Gemma's notation: keys without quotes, strings between tokens of their own."""
    kind, quote = schema.get("type"), rules.literal(QUOTE)
    if schema.get("enum") and all(isinstance(value, str) for value in schema["enum"]):
        _only(schema, "enum")
        return f"({' | '.join(rules.literal(f'{QUOTE}{value}{QUOTE}') for value in schema['enum'])})"
    if isinstance(schema.get("anyOf"), list):
        _only(schema, "anyOf")
        return f"({' | '.join(_gemma_value(rules, each) for each in schema['anyOf'])})"
    if kind == "string":
        _only(schema)
        return f"{quote} {rules.until(QUOTE)}"
    if kind == "array":
        _only(schema, "items", "minItems", "maxItems")
        item = _gemma_value(rules, schema.get("items") or {"type": "string"})
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        more = f'("," {item}){{{max(fewest - 1, 0)},{"" if most is None else most - 1}}}'
        return '"[" "]"' if most == 0 else f'"[" ({item} {more}){"" if fewest else "?"} "]"'
    if kind == "object" and schema.get("properties") is not None:
        members = [
            (f"{rules.literal(f'{name}:')} {_gemma_value(rules, each)}", required)
            for name, each, required in _properties(schema)
        ]
        return f'"{{" {rules.members(members, ",")} "}}"'
    if kind in ("integer", "number", "boolean", "null"):
        return rules.json(schema)
    raise invalid(
        f"tools: calls of this model can be forced for strings, numbers, lists and objects with properties, not for "
        f"{json.dumps(dict(schema))[:100]}; change the parameter, or leave tool_choice and strict out.",
        "tools",
    )


@dataclass(frozen=True)
class Syntax:
    """How one family of models writes calls."""

    marks: tuple[str, ...]  # of its chat templates, each of which they contain
    body: Callable[[Rules, Function], str]  # makes the grammar of a call between begin and end
    region: Json  # of calls in transformers' response template
    begin: str = ""  # in front of a call
    end: str = ""  # after it
    separator: str = ""  # between two calls; empty: an answer has one call
    head: re.Pattern[str] | None = None  # of a call up to its arguments, where these are JSON
    named: str = ""  # what follows `begin`, with NAME for that of the function, where `region` begins after it

    def calls(self, rules: Rules, functions: Sequence[Function], parallel: bool) -> tuple[str, str]:
        """Grammar of one or more calls: the first one's begin, and all after it."""
        bodies = " | ".join(self.body(rules, function) for function in functions)
        one = rules.rule(f"({bodies}) {rules.literal(self.end)}")
        begin = rules.literal(self.begin)
        more = f"({rules.literal(self.separator + self.begin)} {one})*" if parallel and self.separator else ""
        return begin, f"{one} {more}"


_JSON_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_CALL = {"repeats": True, "content": "text"}
_PARSED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
HERMES = Syntax(
    ("<tool_call>",),
    _json('{"name": "NAME", "arguments": ', "}"),
    {"open_pattern": r"\s*<tool_call>\s*", "close": "</tool_call>", **_CALL},
    begin="<tool_call>\n",
    end="\n</tool_call>",
    separator="\n",
    head=_JSON_HEAD,
)
SYNTAXES = (
    replace(
        HERMES,
        marks=("<tool_call>", "<function=", "<parameter="),
        body=_elements("<function=NAME>\n", "<parameter=NAME>\n", "\n</parameter>", "</function>"),
        region={
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"(?<=</parameter>\s*|<function=[^>\n]+>\s*)</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": _PARSED,
        },
        head=None,
        named="<function=NAME>",
    ),
    Syntax(
        ("<tool_call>", "<arg_key>", "<arg_value>"),
        _elements("NAME\n", "<arg_key>NAME</arg_key>\n<arg_value>", "</arg_value>", ""),
        {
            "open_pattern": r"\s*<tool_call>\s*(?P<name>[\w.-]+)(?=\s*(?:<arg_key>|</tool_call>))",
            "close_pattern": r"(?<=</arg_value>\s*|<tool_call>[^<]+)</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"},
            "transform": _PARSED,
        },
        begin="<tool_call>",
        end="</tool_call>",
        separator="\n",
        named="NAME",
    ),
    HERMES,
    Syntax(
        ("[TOOL_CALLS]", "[ARGS]"),
        _json("NAME[ARGS]"),
        {"open": "[TOOL_CALLS]", "close_pattern": r"(?=\[TOOL_CALLS\])", **_CALL},
        begin="[TOOL_CALLS]",
        head=re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*"),
    ),
    Syntax(
        ("[TOOL_CALLS]",),
        _json(' [{"name": "NAME", "arguments": ', "}]"),
        {"open_pattern": r"\[TOOL_CALLS\]", **_CALL},
        begin="[TOOL_CALLS]",
    ),
    Syntax(
        ("<|tool_call>call:", QUOTE),
        _gemma,
        {
            "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [[QUOTE, QUOTE]], "allow_non_json": True},
            "transform": _PARSED,
        },
        begin="<|tool_call>",
        end="<tool_call|>",
        named="call:NAME",
    ),
    Syntax(
        ("<|eot_id|>", '"parameters"'),
        _json('{"name": "NAME", "parameters": ', "}"),
        {"open_pattern": r"^\s*(?:<\|python_tag\|>)?(?=\{)", **_CALL},
        head=_JSON_HEAD,
    ),
)
"""Syntaxes of Qwen3-Coder and Qwen3.5, GLM, Hermes and Qwen, Mistral (two generations), Gemma 4, and Llama; the first
that a chat template has all marks of is the model's. Where a template takes no tools, a message tells of Hermes'."""
THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought\n", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
)
"""Begin and end of reasoning in an answer, by the chat templates that contain them."""

SWITCHES = ("enable_thinking",)
"""Variables of chat templates that let the model think, or not."""


class ReplyFormat:
    """How a model writes reasoning and calls: from its tokenizer and chat template."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self.tokenizer = tokenizer  # the target's
        self._own: Any = getattr(tokenizer, "response_template", None)
        reads = "tools" in template
        found = next((each for each in SYNTAXES if reads and all(mark in template for mark in each.marks)), None)
        self.syntax = found or HERMES
        self.reads_tools = reads and (found is not None or self._own is not None)
        fields = self._own.get("fields", {}) if isinstance(self._own, dict) else {}
        others = [field for name, field in fields.items() if name not in ("content", "tool_calls")]
        marks = [(field.get("open"), field.get("close")) for field in others]
        own = next((pair for pair in marks if all(isinstance(mark, str) for mark in pair)), None)
        self.thought = next((pair for pair in THOUGHTS if pair[1] in template), own)
        self.thinks = self.thought is not None or '"reasoning' in json.dumps(self._own)
        self.switch = next((name for name in SWITCHES if re.search(rf"\b{name}\b", template)), None)

    @cached_property
    def dropped(self) -> frozenset[int]:
        """Special tokens that have no meaning in an answer."""
        syntax = self.syntax
        used = json.dumps([*syntax.marks, syntax.begin, syntax.end, self._own, self.thought])
        tokens = self.tokenizer.added_tokens_decoder.items()
        return frozenset(
            number for number, token in tokens if token.special and json.dumps(token.content)[1:-1] not in used
        )

    def messages(self, messages: Sequence[Json], policy: CallPolicy) -> list[Json]:
        """Messages for the chat template; one that takes no tools gets them, and earlier calls, as text."""
        if self.reads_tools:
            return [dict(message) for message in messages]
        told: list[Json] = []
        for before, message in pairwise([{}, *messages]):
            made = _as_text(message)
            if "tool" in (before.get("role"), message["role"]) and told and told[-1]["role"] == made["role"]:
                parts = [*_parts(told.pop()), {"type": "text", "text": "\n"}, *_parts(made)]
                made = {**made, "content": parts}  # of one turn, as some templates take no two of a side
            told.append(made)
        if policy.functions:
            tools = "\n".join(json.dumps(tool) for tool in policy.as_templates_take_them)
            at = 0 if told[0]["role"] == "system" else next((i for i, m in enumerate(told) if m["role"] == "user"), 0)
            told[at] = _joined(told[at], before=INSTRUCTIONS.format(tools=tools))
        return told

    @property
    def is_plain(self) -> bool:
        """Whether answers without calls are text alone."""
        return self.thought is None and not isinstance(self._own, dict)

    def opened(self, begun: str) -> str:
        """The begin of the reasoning, where the begun answer ends in it."""
        if self.thought is None:
            return ""
        begin, end = self.thought
        return begin if begun.rfind(begin.strip()) > begun.rfind(end) else ""

    def grammar(self, policy: CallPolicy, begun: str, form: Callable[[Rules], str] | None, thinks: bool = True) -> str:
        """Grammar of an answer; ``form`` makes that of an answer without calls, and None allows any text.

        ``begun`` is the text of the answer that its prompt has, of the chat template or of a message to continue.
        """
        rules = Rules(self.tokenizer)
        thought = ""
        if self.thought is not None and thinks:
            begin, end = self.thought
            rest = rf"{rules.until(end)} /\s{{0,{MOST_BLANKS}}}/"
            thought = f"{rest} " if self.opened(begun) else f"({rules.literal(begin)} {rest})? "
        if not policy.functions:
            return rules.start(thought + (form(rules) if form else rules.rule(ANY)))
        begin, rest = self.syntax.calls(rules, policy.forced or policy.functions, policy.parallel)
        if policy.forced:
            return rules.start(f"{thought}{begin} {rest}")
        if form is not None:
            return rules.start(f"{thought}({begin} {rest} | {form(rules)})")
        word = self.syntax.begin.strip()
        if not word:  # calls are the answers that begin with a brace
            return rules.start(f"{thought}({rules.rule('/([^{](.|[^.])*)?/')} | {rest})")
        begin = f"{rules.until(word)} {rules.literal(self.syntax.begin[len(word) :])}"
        return rules.start(f"{thought}({rules.without(word)} | {begin} {rest})")

    def parser(self, policy: CallPolicy, begun: str) -> ReplyParser | None:
        """Parser of an answer, ``begun`` as in `grammar`; None where it can only be text."""
        if isinstance(self._own, dict):
            return ReplyParser(self._own, begun, policy.as_templates_take_them, policy.parallel)
        regions: Json = {"content": {"content": "text", "content_args": {"strip": False}}}
        if self.thought is not None:
            begin, end = (re.escape(word.strip()) for word in self.thought)
            after = f"|(?<={re.escape(self.syntax.end.strip())})" if self.syntax.end else ""  # a call
            reasoning = {"open_pattern": rf"(?:^{after})(?:\s*{begin})+\s*", "close_pattern": rf"\s*{end}\s*"}
            regions["reasoning_content"] = {**reasoning, "content": "text"}
        if policy.functions:
            regions["tool_calls"] = self.syntax.region
        if len(regions) == 1:
            return None
        whole = {"start_anchor_pattern": "^", "fields": regions}
        form = CallText(self.syntax.begin + self.syntax.named, self.syntax.end, self.syntax.head)
        return ReplyParser(whole, self.opened(begun), policy.as_templates_take_them, policy.parallel, form)


INSTRUCTIONS = """\
You can call these functions:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON, and nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"argument": "value"}}}}
</tool_call>
Its result comes in <tool_response>.
"""


def _joined(message: Json, before: str = "", after: str = "") -> Json:
    """A message with a text in front of its own, and one after it."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": "\n".join(filter(None, (before, content, after)))}
    texts = [[{"type": "text", "text": text}] if text else [] for text in (f"{before}\n" * bool(before), after)]
    return {**message, "content": [*texts[0], *content, *texts[1]]}


def _parts(message: Json) -> list[Json]:
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    return list(content)


def _as_text(message: Json) -> Json:
    """A message whose calls, or whose result of one, are text."""
    if message["role"] == "tool":
        begin = {"type": "text", "text": "<tool_response>\n"}
        end = {"type": "text", "text": "\n</tool_response>"}
        return {"role": "user", "content": [begin, *_parts(message), end]}
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
    rest = {key: value for key, value in message.items() if key not in ("tool_calls", "reasoning_content")}
    return _joined(rest, after="\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls))
