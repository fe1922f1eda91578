"""Tool calls and reasoning in the syntaxes of several families: grammars, parsers, prompts, and calls that are forced.

The models here are random, so that grammars force their calls; that chosen ones are read is tested on written answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from live_server import PAINT, Live, asks, live, uri
from openai import OpenAI

from checkpoints import llama, tokenizer, vlm
from saccade import VLM, grammar, load
from saccade.grammar import MOST_BLANKS
from saccade.inputs.processor import InputProcessor, MediaOptions
from saccade.serve.configuration import ModelEntry
from saccade.serve.refusals import Refusal
from saccade.serve.replies import ReplyParser
from saccade.serve.schemas import CallPolicy, ChatRequest, Function, Structure, checked, conversation
from saccade.serve.tools import THOUGHTS, ReplyFormat, Rules, structure_rule

WEATHER = Function(
    name="weather",
    description="Weather of a place.",
    parameters={
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "at": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        },
        "required": ["place", "days"],
        "additionalProperties": False,
    },
)
CLOCK = Function(name="clock")
POLICY = CallPolicy([WEATHER, CLOCK])
FORCED = CallPolicy([WEATHER, CLOCK], [WEATHER, CLOCK])
ARGUMENTS = {"place": 'Köln "am Rhein"\n{1}', "days": 3, "unit": "C", "at": [6, 12]}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
GEMMA = 'call:weather{place:<|"|>Köln "am Rhein"\n{1}<|"|>,days:3,unit:<|"|>C<|"|>,at:[6,12]}'
ELEMENTS = """<function=weather>
<parameter=place>
Köln "am Rhein"
{1}
</parameter>
<parameter=days>
3
</parameter>
<parameter=unit>
C
</parameter>
<parameter=at>
[6, 12]
</parameter>
</function>"""


@dataclass(frozen=True)
class Family:
    """A syntax with a chat template's part and a written call of ``weather``, and of ``clock``."""

    template: str
    call: str
    clock: str
    special: Sequence[str] = ()
    plain: Sequence[str] = ()  # added tokens that are no special ones
    several: bool = True  # whether an answer may have several calls

    @property
    def tokenizer(self) -> Any:
        made = tokenizer(more=self.special)
        made.add_tokens(list(self.plain))
        return made

    @property
    def format(self) -> ReplyFormat:
        return ReplyFormat(self.tokenizer, self.template)


FAMILIES = {
    "hermes": Family(
        "{% if tools %}{{ tools | tojson }} in <tool_call>{% endif %}",
        f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>',
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        plain=("<tool_call>", "</tool_call>"),
    ),
    "elements": Family(
        "{% if tools %}{{ tools | tojson }} <tool_call><function=x><parameter=y>{% endif %}",
        f"<tool_call>\n{ELEMENTS}\n</tool_call>",
        "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        plain=("<tool_call>", "</tool_call>"),
    ),
    "glm": Family(
        "{% if tools %}{{ tools | tojson }} <tool_call>{name}<arg_key>x</arg_key><arg_value>y{% endif %}",
        '<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Köln "am Rhein"\n{1}</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n"
        "<arg_key>at</arg_key>\n<arg_value>[6, 12]</arg_value>\n</tool_call>",
        "<tool_call>clock\n</tool_call>",
        plain=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "mistral": Family(
        "{% if tools %}{{ tools | tojson }}[TOOL_CALLS]x[ARGS]{}{% endif %}",
        f"[TOOL_CALLS]weather[ARGS]{JSON}",
        "[TOOL_CALLS]clock[ARGS]{}",
        special=("[TOOL_CALLS]", "[ARGS]"),
        several=False,
    ),
    "mistral-list": Family(
        "{% if tools %}{{ tools | tojson }}[TOOL_CALLS]{% endif %}",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}}}]',
        '[TOOL_CALLS] [{"name": "clock", "arguments": {}}]',
        special=("[TOOL_CALLS]",),
        several=False,
    ),
    "gemma": Family(
        """{% if tools %}{{ tools | tojson }}<|tool_call>call:x{y:<|"|>z<|"|>}<tool_call|>{% endif %}""",
        f"<|tool_call>{GEMMA}<tool_call|>",
        "<|tool_call>call:clock{}<tool_call|>",
        special=("<|tool_call>", "<tool_call|>", '<|"|>'),
        several=False,
    ),
    "llama": Family(
        """{% if tools %}{{ tools | tojson }} {"name": "x", "parameters": {}}<|eot_id|>{% endif %}""",
        f'{{"name": "weather", "parameters": {JSON}}}',
        '{"name": "clock", "parameters": {}}',
        several=False,
    ),
    "told": Family(
        "{{ messages }}",
        f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>',
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    ),
}


def tool(function: Function) -> dict[str, Any]:
    return {"type": "function", "function": function.model_dump(exclude_none=True)}


def follows(family: Family, policy: CallPolicy, text: str, form: Any = None) -> bool:
    """Whether a grammar allows a whole answer, token for token."""
    tok = family.tokenizer
    rules = family.format.grammar(policy, "", form)
    constraint = grammar.lark(rules, tok, len(tok))
    matcher = constraint.matcher()
    ids = tok.encode(text, add_special_tokens=False)
    return all(constraint.accept(matcher, token) for token in ids) and matcher.is_accepting()


def read(
    parser: ReplyParser | None, pieces: Sequence[str], finish: str = "stop"
) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and calls of an answer that comes in pieces."""
    assert parser is not None
    content = reasoning = ""
    calls: list[list[str]] = []
    for number, piece in enumerate(pieces, 1):
        reply = parser.add(piece, finish if number == len(pieces) else None)
        content, reasoning = content + reply.content, reasoning + reply.reasoning
        for part in reply.calls:
            if "id" in part:
                calls.append([part["function"]["name"], ""])
            assert part["index"] == len(calls) - 1
            calls[-1][1] += part["function"]["arguments"]
    return content, reasoning, [(name, arguments) for name, arguments in calls]


def cuts(text: str) -> Iterator[list[str]]:
    """A text as a whole, by signs, and in pieces of 7."""
    for size in (len(text), 1, 7):
        yield [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_grammar_allows_calls_as_the_family_writes_them(name: str) -> None:
    family = FAMILIES[name]
    assert follows(family, FORCED, family.call)
    assert follows(family, FORCED, family.clock)
    assert not follows(family, FORCED, family.call.replace("weather", "whether"))
    assert not follows(family, FORCED, f"No. {family.call}")
    assert not follows(family, FORCED, "No.")
    assert not follows(family, FORCED, family.call.replace("3", "three", 1))
    assert not follows(family, CallPolicy([WEATHER, CLOCK], [CLOCK]), family.call)
    between = "" if name == "mistral" else "\n"
    both = follows(family, FORCED, family.call + between + family.clock)
    assert both == family.several
    assert not follows(family, CallPolicy(POLICY.functions, FORCED.forced, parallel=False), family.call + family.call)


@pytest.mark.parametrize("name", ["hermes", "elements", "mistral"])
def test_forced_calls_have_no_arguments_but_those_of_the_schema_unless_it_allows_them(name: str) -> None:
    family, mapping = FAMILIES[name], {"type": "object", "properties": {"a": {"type": "integer"}}}
    member, more = '{"a": 1, "b": 2}', '{"a": 1}'
    for schema, allows in ((mapping, False), ({**mapping, "additionalProperties": True}, True)):
        function = Function(name="f", parameters={"type": "object", "properties": {"x": schema}})
        policy = CallPolicy([function], [function])
        for value, right in ((more, True), (member, allows)):
            call = {
                "hermes": f'<tool_call>\n{{"name": "f", "arguments": {{"x": {value}}}}}\n</tool_call>',
                "elements": family.clock.replace("clock>\n", f"f>\n<parameter=x>\n{value}\n</parameter>\n"),
                "mistral": f'[TOOL_CALLS]f[ARGS]{{"x": {value}}}',
            }[name]
            assert follows(family, policy, call) == right


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"allOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {}}}]}, '{"a": 1, "b": 2}'),
        ({"type": "object", "properties": {"properties": {"type": "integer"}}}, '{"properties": 1}'),
        ({"type": "object", "properties": {"a": {"enum": [{"properties": 1}]}}}, '{"a": {"properties": 1}}'),
    ],
)
def test_forced_calls_take_schemas_that_join_others_or_speak_of_properties(schema: Any, value: str) -> None:
    function = Function(name="f", parameters={"type": "object", "properties": {"x": schema}})
    call = f'[TOOL_CALLS]f[ARGS]{{"x": {value}}}'
    assert follows(FAMILIES["mistral"], CallPolicy([function], [function]), call)


def test_gemmas_calls_may_have_values_of_several_kinds() -> None:
    kinds = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    function = Function(name="f", parameters={"type": "object", "properties": {"x": kinds}})
    for value, right in (("null", True), ('<|"|>a<|"|>', True), ("3", False)):
        call = f"<|tool_call>call:f{{x:{value}}}<tool_call|>"
        assert follows(FAMILIES["gemma"], CallPolicy([function], [function]), call) == right


@pytest.mark.parametrize(
    ("bounds", "right"),
    [({}, (0, 1, 2, 3)), ({"minItems": 1}, (1, 2, 3)), ({"minItems": 2, "maxItems": 2}, (2,)), ({"maxItems": 0}, (0,))],
)
def test_lists_in_gemmas_calls_have_as_many_values_as_the_schema_says(bounds: Any, right: Sequence[int]) -> None:
    items = {"type": "array", "items": {"type": "integer"}, **bounds}
    function = Function(name="f", parameters={"type": "object", "properties": {"x": items}})
    calls = [f"<|tool_call>call:f{{x:[{','.join('7' * count)}]}}<tool_call|>" for count in range(4)]
    allowed = [follows(FAMILIES["gemma"], CallPolicy([function], [function]), call) for call in calls]
    assert allowed == [count in right for count in range(4)]


@pytest.mark.parametrize("name", ["gemma", "elements", "glm"])
@pytest.mark.parametrize(
    ("parameters", "keyword"),
    [
        *(
            (({"properties": {"x": {"type": "string", each: value}}}), each)
            for each, value in (("pattern", "a+"), ("minLength", 2), ("maxLength", 3), ("format", "date"))
        ),
        ({"properties": {"x": {"enum": ["a", "b"], "pattern": "a"}}}, "pattern"),
        ({"properties": {"x": {"type": "string"}}, "required": ["y"]}, "required"),
        ({"properties": {"x": {"type": "string"}}, "minProperties": 1}, "minProperties"),
    ],
)
def test_forced_calls_that_are_not_json_refuse_by_name_what_they_would_not_follow(
    name: str, parameters: Any, keyword: str
) -> None:
    function = Function(name="f", parameters={"type": "object", **parameters})
    with pytest.raises(Refusal, match=f"cannot be forced to follow {keyword} in"):
        FAMILIES[name].format.grammar(CallPolicy([function], [function]), "", None)


@pytest.mark.parametrize("name", FAMILIES)
def test_strict_functions_constrain_calls_and_leave_text_free(name: str) -> None:
    family = FAMILIES[name]
    policy = CallPolicy([WEATHER.model_copy(update={"strict": True}), CLOCK])
    assert policy.has_grammar
    assert follows(family, policy, "It rains, doesn't it?")
    assert follows(family, policy, family.call)
    assert not follows(family, policy, family.call.replace("weather", "whether"))
    if name != "llama":  # whose calls are answers of their own
        assert follows(family, policy, f"Let us see.\n{family.call}")
        assert not follows(family, policy, f"Let us see.\n{family.call.replace('weather', 'whether')}")


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_read_as_they_grow(name: str) -> None:
    family = FAMILIES[name]
    before = "" if name == "llama" else "Let us see."
    for pieces in cuts(before + family.call):
        content, reasoning, calls = read(family.format.parser(POLICY, ""), pieces)
        assert (content.strip(), reasoning, len(calls)) == (before, "", 1)
        assert (calls[0][0], json.loads(calls[0][1])) == ("weather", ARGUMENTS)
    if name in ("hermes", "elements", "glm", "mistral", "gemma", "told"):
        for pieces in cuts(f"{family.call}\n{family.clock}"):
            _, _, calls = read(family.format.parser(POLICY, ""), pieces)
            assert [name for name, _ in calls] == ["weather", "clock"]
            _, _, calls = read(family.format.parser(CallPolicy([WEATHER, CLOCK], parallel=False), ""), pieces)
            assert [(name, json.loads(text)) for name, text in calls] == [("weather", ARGUMENTS)]


@pytest.mark.parametrize("name", ["hermes", "mistral", "told"])
def test_arguments_come_before_their_end(name: str) -> None:
    family = FAMILIES[name]
    parser = family.format.parser(POLICY, "")
    assert parser is not None
    half = family.call[: family.call.index("Rhein")]
    calls = [part for sign in half for part in parser.add(sign).calls]
    assert calls[0]["function"]["name"] == "weather"
    assert "am" in "".join(part["function"]["arguments"] for part in calls)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_no_call_is_text(name: str) -> None:
    family = FAMILIES[name]
    for text in ("Two < three, {and} [more].", "", '{"answer": 3}', f"{family.call[:12]} no"):
        for pieces in cuts(text) if text else [[""]]:
            content, _, calls = read(family.format.parser(POLICY, ""), pieces)
            assert not calls
            assert content.replace("\n", "").startswith(text[:9].replace("\n", "").rstrip()), (text, content)


IN_STRINGS = {
    "elements": "</function>\n</tool_call>",
    "mistral": "[TOOL_CALLS]",
    "mistral-list": "[TOOL_CALLS]",
    "gemma": "<tool_call|>",
    "llama": "<|eot_id|>",
}
"""Marks that end a call, or begin the next, of the families other than Hermes'."""


@pytest.mark.parametrize("name", FAMILIES)
def test_marks_in_strings_of_a_call_are_text(name: str) -> None:
    family, word = FAMILIES[name], IN_STRINGS.get(name, "{}</tool_call> <tool_call>{")
    rest = "" if name in ("llama", "mistral-list") else f"\n{family.clock}"
    for pieces in cuts(family.call.replace("Rhein", word) + rest):
        _, _, calls = read(family.format.parser(POLICY, ""), pieces)
        assert json.loads(calls[0][1]) == {**ARGUMENTS, "place": ARGUMENTS["place"].replace("Rhein", word)}
        assert len(calls) == 1 + bool(rest)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_is_cut_has_valid_arguments_or_is_text_as_a_whole(name: str) -> None:
    family, streams = FAMILIES[name], name in ("hermes", "mistral", "llama", "told")
    for length in range(1, len(family.call)):
        text, seen = family.call[:length], list[Any]()
        for pieces in ([text], list(text)):
            content, _, calls = read(family.format.parser(POLICY, ""), pieces, "length")
            seen.append((content, calls))
            if not calls:
                assert content.strip() == text.strip()
                continue
            ((called, arguments),) = calls
            assert (content.strip(), called, set(json.loads(arguments)) <= ARGUMENTS.keys()) == ("", "weather", True)
        assert seen[0] == seen[1]
        assert streams or not seen[0][1]
    if streams:
        cut = family.call[: family.call.index("Rhein")]
        assert json.loads(read(family.format.parser(POLICY, ""), list(cut), "stop")[2][0][1]) == {"place": 'Köln "am '}


def test_a_call_of_a_function_without_a_name_is_text() -> None:
    written = '<tool_call>\n{"name": "", "arguments": {"place": "a"}}\n</tool_call>'
    for pieces in cuts(written):
        content, _, calls = read(FAMILIES["hermes"].format.parser(POLICY, ""), pieces)
        assert (content.split(), calls) == (written.split(), [])


@pytest.mark.parametrize("arguments", ["{'place': 3}", "{\"place\": 3, 'days': True}", '{"place": tru}', "[3]", '"no"'])
def test_arguments_that_are_no_json_are_in_the_content_too(arguments: str) -> None:
    written = f'{{"name": "weather", "arguments": {arguments}}}'
    for pieces in cuts(f"<tool_call>\n{written}\n</tool_call>"):
        content, _, calls = read(FAMILIES["hermes"].format.parser(POLICY, ""), pieces)
        assert written in content
        assert all(isinstance(json.loads(text), dict) for _, text in calls)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"name": "weather", "arguments": {"place": "a\nb"}}', {"place": "a\nb"}),
        ('{"name": "weather", "arguments": {"place": "a"}', {"place": "a"}),
        ('{"name": "weather", "arguments": {"place": "a"', {"place": "a"}),
        ('{"arguments": {"place": "a"}, "name": "weather"}', {"place": "a"}),
        ('{"name": "weather", "arguments": "{\\"place\\": 3}"}', {"place": 3}),
        ('{"name": "weather"}', {}),
        ('{"name": "weather", "arguments": null}', {}),
    ],
)
def test_calls_that_models_write_less_than_well_have_valid_arguments(written: str, expected: Any) -> None:
    for pieces in cuts(f"<tool_call>\n{written}\n</tool_call>\nSo."):
        content, _, calls = read(FAMILIES["hermes"].format.parser(POLICY, ""), pieces)
        assert (content.strip(), [(name, json.loads(text)) for name, text in calls]) == ("So.", [("weather", expected)])


THINKS = "{% if enable_thinking %}<think>{% endif %}</think>"


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_divided_from_the_answer(opened: bool) -> None:
    tok = tokenizer()
    tok.add_tokens(["<think>", "</think>"])
    reply = ReplyFormat(tok, THINKS)
    begun = "assistant: <think>\n" if opened else "assistant: "
    text = ("" if opened else "<think>\n") + "Is it?\n</think>\n\nIt is <think>ing."
    for pieces in cuts(text):
        assert read(reply.parser(CallPolicy(), begun), pieces) == ("It is <think>ing.", "Is it?", [])
    for pieces in cuts("Is it" if opened else "<think>Is it"):  # cut at the limit
        assert read(reply.parser(CallPolicy(), begun), pieces, "length") == ("", "Is it", [])
    for pieces in cuts("Is it" if opened else "<think>Is it"):  # ended by the model
        assert read(reply.parser(CallPolicy(), begun), pieces) == ("Is it", "Is it", [])
    for pieces in cuts("Is it</think>" if opened else "<think>Is it</think>"):
        assert read(reply.parser(CallPolicy(), begun), pieces) == ("", "Is it", [])
    closed = "assistant: <think>\n\n</think>\n\n"
    assert read(reply.parser(CallPolicy(), closed), ["It is."]) == ("It is.", "", [])
    rules = reply.grammar(CallPolicy(), begun, lambda rules: structure_rule(Structure("choice", ["yes", "no"]), rules))
    constraint = grammar.lark(rules, tok, len(tok))
    begin, many, more = "" if opened else "<think>", " " * MOST_BLANKS, " " * (MOST_BLANKS + 1)
    blanks = ((f"{begin}Hm.</think>{many}no", True), (f"{begin}Hm.</think>{more}no", False))  # never without end
    answers = (("Hm.</think>\n\nyes", opened), ("<think>Hm.</think>no", not opened), ("maybe", False), *blanks)
    for answer, right in answers:
        matcher = constraint.matcher()
        ids = tok.encode(answer, add_special_tokens=False)
        assert (all(constraint.accept(matcher, token) for token in ids) and matcher.is_accepting()) == right


def test_calls_in_a_thought_that_the_model_ends_are_calls_and_a_thought_can_follow_a_call() -> None:
    family = FAMILIES["hermes"]
    reply = ReplyFormat(family.tokenizer, family.template + THINKS)
    for pieces in cuts(f"Hm.\n{family.clock}"):
        content, reasoning, calls = read(reply.parser(POLICY, "<think>"), pieces)
        assert (content.strip(), calls) == ("Hm.", [("clock", "{}")])
        assert family.clock in reasoning
    for pieces in cuts(f"Hm.</think>{family.clock}\n<think>Well.</think>So."):
        assert read(reply.parser(POLICY, "<think>"), pieces) == ("So.", "Hm.Well.", [("clock", "{}")])


def test_a_tokenizers_own_response_template_comes_first() -> None:
    tok = tokenizer()
    tok.response_template = {
        "start_anchor": "assistant: ",
        "fields": {
            "thinking": {"open": "(", "close": ")"},
            "content": {"content": "text"},
            "tool_calls": {
                "open_pattern": r"@(?P<name>\w+)",
                "close": ";",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
    reply = ReplyFormat(tok, "{{ tools }}")
    begun = "user: (\nassistant: ("
    for pieces in cuts('so)Yes.@weather{"place": "here"};'):
        assert read(reply.parser(POLICY, begun), pieces) == ("Yes.", "so", [("weather", '{"place": "here"}')])
    for pieces in cuts('so)@weather{"place": "a; b"};'):
        assert read(reply.parser(POLICY, begun), pieces)[2] == [("weather", '{"place": "a; b"}')]
    for pieces in cuts("so)Yes.@weather{here"):  # which transformers refuses
        content, _, calls = read(reply.parser(POLICY, begun), pieces)
        assert not calls
        assert "{here" in content


@pytest.mark.parametrize(
    ("structure", "right", "wrong"),
    [
        (Structure("regex", r"[0-9]{2}/[a-c]\/\d"), "12/b/3", "1/b/3"),
        (Structure("choice", ['a "quoted" one', "b\n"]), 'a "quoted" one', "b"),
        (Structure("json", '{"type": "array", "items": {"type": "integer"}}'), "[1,2]", "[1, 2]"),
        (Structure("json", {"type": "array"}, whitespace=True), "[ 1,\n2]", "[ 1,"),
    ],
)
def test_a_structure_is_a_grammar(structure: Structure, right: str, wrong: str) -> None:
    tok = tokenizer()
    rules = Rules(tok)
    constraint = grammar.lark(rules.start(structure_rule(structure, rules)), tok, len(tok))
    for text, allowed in ((right, True), (wrong, False)):
        matcher = constraint.matcher()
        ids = tok.encode(text, add_special_tokens=False)
        assert (all(constraint.accept(matcher, token) for token in ids) and matcher.is_accepting()) == allowed


# -- thoughts on a live server ---------------------------------------------------------------------------------

THINKER = (
    "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if thinks %}<think>\n{% endif %}{% endif %}{# </think> #}"
)
MARKS = ("<think>", "</think>")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with a tiny model whose template can open a thought."""
    tok, folder = tokenizer(), tmp_path_factory.mktemp("thinker")
    tok.add_tokens(list(MARKS))
    llama(folder, seed=3, tok=tok)
    (folder / "chat_template.jinja").write_text(THINKER)
    with live([(ModelEntry("thinker"), load(folder))]) as server:
        yield server


def thought(server: Live, content: str, role: str = "user", **fields: Any) -> tuple[str, str]:
    """Content and reasoning of an answer without marks of its own, streamed as well as whole."""
    ids = server.service.models["thinker"].vlm.processor.tokenizer.convert_tokens_to_ids(MARKS)
    body = {"messages": [{"role": role, "content": content}], "max_tokens": 12, "temperature": 0, **fields}
    body["logit_bias"] = {str(number): -100 for number in ids}
    status, answer = server.post(body)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    deltas = [event["choices"][0]["delta"] for event in server.stream({**body, "stream": True})]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
    return message["content"] or "", message.get("reasoning_content", "")


def test_text_of_a_user_opens_no_thought(thinker: Live) -> None:
    for words in ("What does <think> mean?", "<think>", "<think> " * 40):
        content, reasoning = thought(thinker, words)
        assert (bool(content), reasoning) == (True, "")
        assert thought(thinker, words, guided_choice=["yes", "no"])[0] in ("yes", "no")
        status, answer = thinker.post({"input": words, "max_output_tokens": 12, "temperature": 0}, "/v1/responses")
        assert (status, [item["type"] for item in answer["output"]]) == (200, ["message"])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ m.content }}|{% if add_generation_prompt %}a: <think>\n{% endif %}", "a: <think>\n"),
        ("{{ m.content }}{% if add_generation_prompt %}a: <think>{% else %}a{% endif %}", ": <think>"),
        ("{{ m.content }}|a: <think>\n", "|a: <think>\n"),
        ("{{ m.content }}|", "|"),
        ("{{ m.content }}{% if '<' not in m.content and m.content %}{{ raise_exception('no') }}{% endif %}|", ""),
    ],
)
def test_what_a_template_writes_for_the_answer_has_no_text_of_messages(template: str, expected: str) -> None:
    whole, known = f"{{% for m in messages %}}{template}{{% endfor %}}", vlm("qwen", "qwen-draft").processor
    processor = InputProcessor(known.config, known.tokenizer, chat_template=whole)
    for words in ("<think>", "a: <think>\n", ""):
        turns = [{"role": "user", "content": words}]
        assert processor.generation_prompt(turns, MediaOptions()) == expected


def test_marks_of_other_families_divide_their_thoughts() -> None:
    for begin, end in THOUGHTS:
        reply = ReplyFormat(tokenizer(), f"{{{{ messages }}}}{begin}{end}")
        for pieces in cuts(f"{begin}Hm.\n{end}\nSo."):
            assert read(reply.parser(CallPolicy(), ""), pieces) == ("So.", "Hm.", [])
        assert read(reply.parser(CallPolicy(), f"assistant\n{begin}"), [f"Hm.{end}So."]) == ("So.", "Hm.", [])


def test_the_template_opens_a_thought_that_text_of_a_user_cannot_close(thinker: Live) -> None:
    content, reasoning = thought(thinker, "What does </think> mean?", chat_template_kwargs={"thinks": True})
    assert (content, bool(reasoning)) == ("", True)


def test_stop_strings_end_the_answer_and_not_the_thought(thinker: Live) -> None:
    thinks: Any = {"chat_template_kwargs": {"thinks": True}}
    _, reasoning = thought(thinker, "Hi", **thinks)
    assert thought(thinker, "Hi", stop=[reasoning[2:5]], **thinks) == ("", reasoning)
    content, _ = thought(thinker, "Hi")
    assert thought(thinker, "Hi", stop=[content[2:5]]) == (content[: content.index(content[2:5])], "")
    continued: Any = {"continue_final_message": True}
    content, _ = thought(thinker, "<think>Hm</think>It", "assistant", **continued)
    stopped, _ = thought(thinker, "<think>Hm</think>It", "assistant", stop=content[3:6], **continued)
    assert stopped == content[: content.index(content[3:6])]


@pytest.mark.parametrize("words", ["so", "so " * 200])
def test_a_thought_is_continued_whatever_its_length(thinker: Live, words: str) -> None:
    content, reasoning = thought(thinker, f"<think>{words}", "assistant", continue_final_message=True)
    assert (content, bool(reasoning)) == ("", True)
    content, reasoning = thought(thinker, f"<think>{words}</think>It", "assistant", continue_final_message=True)
    assert (bool(content), reasoning) == (True, "")


# -- on a live server ------------------------------------------------------------------------------------------

TOOLS: list[Any] = [
    {"type": "function", "function": PAINT},
    {"type": "function", "function": {"name": "wash", "description": "Wash the brush."}},
]


def allowing(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TURNS = (
    "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, dict[str, VLM]]]:
    """A server with a tiny model of every family, each with a tiny drafter of its own."""
    models = dict[str, VLM]()
    for name, family in FAMILIES.items():
        folders = [tmp_path_factory.mktemp(name) for _ in range(2)]
        for seed, folder in enumerate(folders):
            llama(folder, seed=seed + 1, tok=family.tokenizer)
            if name != "told":
                (folder / "chat_template.jinja").write_text(TURNS + family.template)
        models[name] = load(*folders, "chain")
    with live([(ModelEntry(name), model) for name, model in models.items()], batches=8) as server:
        yield server, models


def arguments_of(call: Any) -> Any:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "paint":
        assert arguments["colour"] in ("red", "green")
        assert 1 <= arguments["layers"] <= 9
    else:
        assert (call.function.name, arguments) == ("wash", {})
    return arguments


@pytest.mark.parametrize("name", FAMILIES)
def test_forced_calls_are_those_of_generate_under_the_same_grammar(
    families: tuple[Live, dict[str, VLM]], name: str
) -> None:
    server, models = families
    client, model = server.client(), models[name]
    request: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": "Paint it."}], "tools": TOOLS}
    request |= {"tool_choice": "required", "max_tokens": 200, "temperature": 0, "parallel_tool_calls": False}
    answers = [
        client.chat.completions.create(**request, extra_body={"speculation": method}).choices[0]
        for method in ("off", "chain", "dynamic-tree")
    ]
    assert {answer.finish_reason for answer in answers} == {"tool_calls"}
    called = [[(call.function.name, arguments_of(call)) for call in answer.message.tool_calls] for answer in answers]
    assert called[0] == called[1] == called[2]
    assert all(answer.message.content is None for answer in answers)

    reply = server.service.models[name].planner.replies
    policy = CallPolicy(functions := [Function(**tool["function"]) for tool in TOOLS], functions, parallel=False)
    messages = reply.messages(request["messages"], policy)
    variables = {"tools": policy.as_templates_take_them} if reply.reads_tools else {}
    processor = grammar.lark(reply.grammar(policy, "", None), model.processor.tokenizer, model.target.vocab_size)
    options: dict[str, Any] = {"max_new_tokens": 200, "eos_token_id": model.processor.tokenizer.eos_token_id}
    output = model.using("plain").generate(
        messages, logits_processor=[processor], template_options=variables, do_sample=False, **options
    )
    text = model.processor.tokenizer.decode(output.tokens[:-1])
    _, _, expected = read(reply.parser(policy, ""), [text])
    assert [(name, json.loads(arguments)) for name, arguments in expected] == called[0]

    named = {"type": "function", "function": {"name": "wash"}}
    answer = client.chat.completions.create(**{**request, "tool_choice": named}).choices[0]
    assert [call.function.name for call in answer.message.tool_calls] == ["wash"]


def test_a_choice_of_allowed_tools_tells_of_all_and_lets_those_be_called(
    families: tuple[Live, dict[str, VLM]],
) -> None:
    server, _ = families
    body = {"model": "hermes", "messages": asks("Paint it."), "tools": TOOLS, "max_tokens": 200, "temperature": 1.0}
    counts = {server.post({**body, "seed": 1, "max_tokens": 1})[1]["usage"]["prompt_tokens"]}
    for seed in range(4):
        choice = {"tool_choice": allowing("required", "wash"), "seed": seed, "parallel_tool_calls": False}
        status, answer = server.post({**body, **choice})
        assert status == 200
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "wash", "arguments": "{}"}
        counts.add(answer["usage"]["prompt_tokens"])
    assert len(counts) == 1, "the prompt has all tools"
    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "wash"}]}
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"model": "hermes", "input": "Paint it.", "tools": tools, "tool_choice": flat, "max_output_tokens": 200}
    status, answer = server.post({**body, "parallel_tool_calls": False}, "/v1/responses")
    assert status == 200
    assert [(item["type"], item.get("name")) for item in answer["output"]] == [("function_call", "wash")]
    assert answer["tool_choice"] == flat
    status, answer = server.post({**body, "tool_choice": {**flat, "mode": "any"}}, "/v1/responses")
    assert status == 400
    assert "type function and name, or with type allowed_tools, mode (auto or required) and tools" in str(answer)


def test_tools_that_are_not_allowed_cannot_be_called_by_choice() -> None:
    family = FAMILIES["hermes"]
    fields = {"messages": asks("Hi"), "tools": [tool(WEATHER), tool(CLOCK)], "tool_choice": allowing("auto", "clock")}
    policy = checked(ChatRequest, fields).policy
    assert follows(family, policy, "No.")
    assert follows(family, policy, family.clock)
    assert not follows(family, policy, family.call)


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_streamed_in_parts_that_join_to_the_whole(families: tuple[Live, dict[str, VLM]], name: str) -> None:
    client = families[0].client()
    request: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": "Paint it."}], "tools": TOOLS}
    request |= {"tool_choice": "required", "max_tokens": 200, "temperature": 1.0, "parallel_tool_calls": False}
    for seed in range(3):
        whole = client.chat.completions.create(**request, seed=seed).choices[0]
        with client.chat.completions.stream(**request, seed=seed) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0]
        assert whole.message.tool_calls is not None
        assert streamed.message.tool_calls is not None
        about = [
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
            for choice in (whole, streamed)
        ]
        assert about[0] == about[1]
        assert (whole.finish_reason, streamed.finish_reason) == ("tool_calls", "tool_calls")
        for call in whole.message.tool_calls:
            arguments_of(call)


def test_calls_among_others_are_as_alone(families: tuple[Live, dict[str, VLM]]) -> None:
    server, _ = families
    bodies = list[dict[str, Any]]()
    for number in range(24):
        tools = {"tools": TOOLS, "tool_choice": ["auto", "required"][number % 2], "parallel_tool_calls": False}
        form = [{}, {"guided_regex": "[ab]{3,9}"}, tools][number % 3]
        body = {
            "model": list(FAMILIES)[number % 4],
            "messages": [{"role": "user", "content": f"Say {number}."}],
            **form,
        }
        sampled = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0}
        bodies.append(
            {
                **body,
                **sampled,
                "max_tokens": 200 if "tools" in form else 40,
                "speculation": ["off", "chain"][number % 2],
            }
        )

    def ask(body: dict[str, Any]) -> Any:
        status, answer = server.post(body)
        assert status == 200, answer
        (choice,) = answer["choices"]
        for call in choice["message"].get("tool_calls", ()):
            del call["id"]
        return choice

    alone = [ask(body) for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, bodies)) == alone
    assert {choice["finish_reason"] for choice in alone} >= {"tool_calls", "length"}


def history(client: OpenAI, model: str) -> list[Any]:
    """A conversation with a call and its result."""
    first: list[Any] = [{"role": "system", "content": "Paint."}, {"role": "user", "content": "A wall?"}]
    choice = client.chat.completions.create(
        model=model,
        messages=first,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
    ).choices[0]
    calls = choice.message.tool_calls or []
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
    return [*first, choice.message.model_dump(exclude_none=True), *results]


@pytest.mark.parametrize("name", FAMILIES)
def test_results_of_calls_reach_the_prompt(families: tuple[Live, dict[str, VLM]], name: str) -> None:
    server, models = families
    client = server.client()
    messages = history(client, name)
    answer = client.chat.completions.create(model=name, messages=messages, tools=TOOLS, max_tokens=5, temperature=0)
    status, prompt = server.post({"model": name, "messages": messages}, "/tokenize")
    assert status == 200
    text = models[name].processor.tokenizer.decode(prompt["tokens"])
    assert "done" in text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > prompt["count"], "tools are in the prompt, too"
    without = client.chat.completions.create(
        model=name, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=5, temperature=0
    )
    assert without.usage is not None
    assert without.usage.prompt_tokens == prompt["count"]


def test_a_call_that_is_cut_has_the_arguments_so_far(families: tuple[Live, dict[str, VLM]]) -> None:
    body = {"model": "hermes", "messages": asks("Paint it."), "tools": TOOLS, "tool_choice": "required"}
    status, answer = families[0].post({**body, "max_tokens": 45, "temperature": 0})
    assert status == 200
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"place": "Kö', {"place": "Kö"}),
        ('{"place": "Köln", "da', {"place": "Köln"}),
        ('{"at": [6, 1', {"at": [6, 1]}),
        ("{", {}),
        ("", {}),
    ],
)
def test_a_call_that_was_cut_can_be_sent_back(shared: Live, arguments: str, expected: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    answer: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [*asks("Hi"), answer, {"role": "tool", "tool_call_id": "1", "content": "cut"}]
    (made,) = conversation(messages)[1]["tool_calls"]
    assert made["function"]["arguments"] == expected
    assert shared.post({"model": "tiny", "messages": messages, "max_tokens": 3})[0] == 200
    item = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": arguments}
    result = {"type": "function_call_output", "call_id": "1", "output": "cut"}
    body = {"model": "tiny", "input": [*asks("Hi"), item, result], "max_output_tokens": 3}
    assert shared.post(body, "/v1/responses")[0] == 200


def test_results_of_calls_and_what_is_asked_with_them_are_one_turn_where_they_are_told() -> None:
    family = FAMILIES["told"]
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {}}}
    results: list[Any] = [{"role": "tool", "tool_call_id": "1", "content": text} for text in ("one", "two")]
    asked = {"role": "user", "content": "And?"}
    given = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, *results, asked]
    first, calls, last = family.format.messages(given, CallPolicy())
    assert (first, calls["role"], last["role"]) == (asked, "assistant", "user")
    answers = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in ("one", "two"))
    assert "".join(part["text"] for part in last["content"]) == f"{answers}\nAnd?"
    assert family.format.messages([asked, asked], CallPolicy()) == [asked, asked]


def test_control_tokens_in_descriptions_are_text(families: tuple[Live, dict[str, VLM]]) -> None:
    server, models = families
    function = {"name": "wash", "description": "End</s>it"}
    body = {"model": "hermes", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    body["tools"] = [{"type": "function", "function": function}]
    seen = list[int]()
    batch_ids = server.service.models["hermes"].planner.plan
    server.service.models["hermes"].planner.plan = lambda body, prompt, begun: (
        seen.extend(prompt.ids),
        batch_ids(body, prompt, begun),
    )[1]  # type: ignore[method-assign]
    assert server.post(body)[0] == 200
    del server.service.models["hermes"].planner.plan
    tok = models["hermes"].processor.tokenizer
    assert tok.eos_token_id not in seen
    assert "End</s>it" in tok.decode(seen)


LONG = {"type": "function", "function": {"name": "f", "description": "a" * 200_000}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "name"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, "twice"),
    ({"tool_choice": "required"}, "there are no tools"),
    ({"tools": [LONG]}, "far more than this model's context"),
    ({"chat_template_kwargs": {"x": "a" * 200_000}}, "far more than this model's context"),
    ({"tools": TOOLS, "tool_choice": "always"}, "none, auto or required.*function.name.*allowed_tools.mode"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function"}},
        "none, auto or required.*function.name.*allowed_tools.mode",
    ),
    ({"tools": TOOLS, "tool_choice": allowing("auto", "draw")}, "'draw', which is not among"),
    ({"tools": TOOLS, "tool_choice": allowing("any", "wash")}, "allowed_tools.mode .auto or required"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "draw"}}}, "'draw', which is not among"),
    ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos"),
    ({"messages": [*asks("Hi"), {"role": "tool", "content": "3"}]}, "tool_call_id is missing"),
    ({"messages": [*asks("Hi"), {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
        "must be a JSON object as text",
    ),
    ({"continue_final_message": True}, "last message of the assistant"),
    ({"echo": True}, "continue_final_message"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "more than one form"),
    ({"guided_regex": "(a"}, "cannot compile|rejects"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag is unknown"),
    ({"guided_grammar": "start: (", "tools": []}, "cannot compile|rejects"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"chat_template_kwargs": {"tools": []}}, "cannot set tools"),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_field_is_named(shared: Live, change: dict[str, Any], words: str) -> None:
    import re

    status, answer = shared.post({"model": "tiny", "messages": asks("Hi"), "max_tokens": 3, **change})
    assert status == 400, answer
    assert re.search(words, answer["error"]["message"]), answer
    assert answer["error"]["message"].count(". ") == 0


# -- other forms of answers --------------------------------------------------------------------------------------


def answered(shared: Live, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    status, answer = shared.post({"model": "tiny", "max_tokens": 12, "temperature": 0, **fields}, path)
    assert status == 200, answer
    return answer["choices"][0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_choice": ["red!", "green!"]}, ["red!", "green!"]),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ["yes", "no"]),
        ({"guided_regex": "a{3}"}, ["aaa"]),
        ({"structured_outputs": {"regex": "b/c"}}, ["b/c"]),
        ({"guided_grammar": 'start: "x" "y"'}, ["xy"]),
        ({"guided_json": {"const": 7}}, ["7"]),
        ({"structured_outputs": {"json": {"const": [1, 2]}}}, ["[1,2]"]),
    ],
    ids=str,
)
def test_structured_outputs(shared: Live, fields: dict[str, Any], expected: list[str]) -> None:
    chat = answered(shared, messages=asks("Which?", uri(1)), **fields)
    assert chat["message"]["content"] in expected
    assert chat["finish_reason"] == "stop"
    raw = answered(shared, "/v1/completions", prompt="Which? ", **fields)
    assert raw["text"] in expected


def test_an_answer_goes_on_from_the_last_message(shared: Live) -> None:
    first = answered(shared, messages=asks("Tell."))["message"]["content"]
    begun = [*asks("Tell."), {"role": "assistant", "content": first[:5]}]
    rest = answered(shared, messages=begun, continue_final_message=True, max_tokens=7)["message"]["content"]
    assert first[:5] + rest == first
    echoed = answered(shared, messages=begun, continue_final_message=True, echo=True, max_tokens=7)
    assert echoed["message"]["content"] == first
    body = {"model": "tiny", "messages": begun, "continue_final_message": True, "echo": True, "max_tokens": 7}
    events = shared.stream({**body, "temperature": 0, "stream": True})
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == first
    raw = answered(shared, "/v1/completions", prompt="Once", echo=True)["text"]
    assert raw == "Once" + answered(shared, "/v1/completions", prompt="Once")["text"]


def test_a_stop_token_ends_an_answer_without_its_text(shared: Live) -> None:
    whole = answered(shared, messages=asks("Tell."))["message"]["content"]
    ids = vlm("qwen", "qwen-draft").processor.tokenizer.encode(whole, add_special_tokens=False)
    place = next(n for n, token in enumerate(ids) if n and token not in ids[:n])
    for extra in ({}, {"ignore_eos": True}):
        stopped = answered(shared, messages=asks("Tell."), stop_token_ids=[ids[place]], **extra)
        assert (stopped["message"]["content"], stopped["finish_reason"]) == (whole[:place], "stop")


def test_biases_of_a_whole_vocabulary(shared: Live) -> None:
    size = vlm("qwen", "qwen-draft").target.vocab_size
    bias = {str(token): -100 for token in range(size) if token != 40}
    assert answered(shared, messages=asks("Tell."), logit_bias=bias)["message"]["content"] == "I" * 12


def test_several_answers_read_their_picture_once(tmp_path: Path) -> None:
    with live() as server:
        fields = {"messages": asks("Tell.", uri(7)), "n": 4, "temperature": 1.0, "seed": 1}
        status, answer = server.post({"model": "tiny", "max_tokens": 5, **fields})
        assert status == 200
        assert len({choice["message"]["content"] for choice in answer["choices"]}) > 1
        server.until(lambda: server.is_idle)
        counts = server.service.owner.counts
        assert counts.media_misses["tiny"] == 1
