"""Every answer under a schema validates by the package jsonschema, or the schema is refused before the first token."""

from __future__ import annotations

import json
import random
from decimal import Decimal
from functools import cache
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from saccade.errors import InputError
from saccade.grammar import Rollback, json_schema, lark
from saccade.schema import EXACT, enforceable

pytest.importorskip("llguidance", reason="schemas need the serve or grammar extra")

END = 1
PIECES = ["<pad>", "</s>", *map(chr, range(32, 127)), "é", "\n", '"a"', '":', '{"', '",', '"}', "12", "},{", "[{"]
INT: dict[str, Any] = {"type": "integer"}
TEXT: dict[str, Any] = {"type": "string", "maxLength": 3}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, [], unk_token="<pad>"))
    words.decoder = decoders.ByteFallback()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")


def constraint(schema: Any) -> Rollback:
    return json_schema(schema, tokenizer(), len(PIECES))


def walk(own: Rollback, source: random.Random) -> str | None:
    """An answer of random allowed tokens, which tends to its end; None where it does not come to one."""
    state, text = own.start(()), ""
    for count in range(400):
        allowed = own.scores(state, torch.zeros(len(PIECES))).isfinite().nonzero().flatten().tolist()
        if END in allowed and (len(allowed) == 1 or count > 40 or source.random() < 0.3):
            return text
        closing = [token for token in allowed if PIECES[token][0] in '"]}']
        hurries = source.random() < (0.9 if count > 40 else 0.25)
        token = source.choice(closing if closing and hurries else [token for token in allowed if token != END])
        text += PIECES[token]
        state = own.advance(state, token)
    return None


def answers(schema: Any, count: int) -> list[str]:
    own, source = constraint(schema), random.Random(0)
    return [text for _ in range(count) if (text := walk(own, source)) is not None]


def objects(properties: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


TAGGED = [objects({"k": {"const": tag}, tag: INT}, required=["k"]) for tag in "ab"]
FOLLOWED: dict[str, dict[str, Any]] = {
    "a required name that is no property": objects({"a": INT}, required=["a", "z"]),
    "allOf of two": {"allOf": [objects({"a": INT}, required=["a"]), objects({"b": TEXT}, required=["b"])]},
    "allOf of bounds": {**INT, "allOf": [{"multipleOf": 2}, {"multipleOf": 3}, {"minimum": 5}]},
    "allOf of patterns": {**TEXT, "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]},
    "allOf of which one is closed": {
        "allOf": [objects({"a": INT}, additionalProperties=False), {"properties": {"b": INT}}, {"required": ["a"]}]
    },
    "enum beside a type": {**INT, "enum": [1, "x", 2.5, 4]},
    "enum beside a bound": {"enum": [1, 2, 3, 10], "maximum": 3},
    "$ref beside a bound": {"$defs": {"a": {**INT, "minimum": 3}}, "$ref": "#/$defs/a", "maximum": 9},
    "$ref to an anchor": {"$ref": "#x", "$defs": {"a": {"$anchor": "x", **INT}}},
    "anyOf beside properties": objects({"a": INT}, required=["a"], anyOf=[{"required": ["b"]}, {"required": ["c"]}]),
    "oneOf of kinds": {"oneOf": [TEXT, INT, {"type": "null"}]},
    "oneOf of tagged objects": {"oneOf": TAGGED},
    "const": {"const": {"a": [1, None, "x"], "b": -2.5}},
    "multipleOf on numbers": {"type": "number", "multipleOf": 0.25, "minimum": -2, "maximum": 90},
    "multipleOf of tenths": {"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 99},
    "bounds of numbers": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "bounds of whole numbers": {**INT, "exclusiveMinimum": -3, "exclusiveMaximum": 4},
    "bounds as in draft 4": {**INT, "minimum": 3, "exclusiveMinimum": True, "maximum": 6},
    "bounds of uint64": {**INT, "minimum": 0, "maximum": 2**64 - 1, "format": "uint64"},
    "minItems": {"type": "array", "items": INT, "minItems": 3, "maxItems": 4},
    "prefixItems": {"type": "array", "prefixItems": [INT, {"type": "boolean"}], "items": False, "minItems": 1},
    "items as in draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [INT, {"type": "boolean"}],
        "additionalItems": False,
    },
    "minProperties of one": {"type": "object", "minProperties": 1, "additionalProperties": INT},
    "minProperties after required ones": {
        "type": "object",
        "required": ["a", "b"],
        "minProperties": 3,
        "additionalProperties": INT,
    },
    "minProperties of named ones": objects({"a": INT, "b": INT}, minProperties=1),
    "maxProperties": {"type": "object", "maxProperties": 2, "additionalProperties": INT},
    "patternProperties": {"type": "object", "patternProperties": {"^x": INT}, "additionalProperties": False},
    "patternProperties beside properties": objects(
        {"xa": {"type": "number"}}, required=["xa"], patternProperties={"^x": {"maximum": 4}}
    ),
    "additionalProperties beside properties": objects({"a": INT}, additionalProperties={"type": "boolean"}),
    "a property that must be absent": objects({"a": False, "b": INT}),
    "names with quotes": objects({'a"b': INT, "c\nd": INT}, required=['a"b', "c\nd"]),
    "patterns": {"type": "string", "pattern": "^[a-c]{2,4}$"},
    "a pattern somewhere": {"type": "string", "pattern": "bc", "maxLength": 5},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 3},
    "several types": {"type": ["integer", "null"], "minimum": 2, "maximum": 5},
    "keywords of other types": {"type": "boolean", "minimum": 3, "pattern": "a"},
    "keywords that nobody knows": {**INT, "x-order": 1, "deprecated": True, "nullable": True},
    "records as zod has them": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INT},
    "a list that is no set": {"type": "array", "items": INT, "uniqueItems": False},
    "formats of any text": objects({name: {**TEXT, "format": name} for name in ("binary", "password", "path")}),
    **{f"format {name}": {"type": "string", "format": name} for name in ("date", "time", "ipv4", "uuid", "duration")},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "not": ({**INT, "not": {"const": 3}}, "not"),
    "dependentRequired": (objects({"a": INT}, dependentRequired={"a": ["b"]}), "dependentRequired"),
    "dependencies": (objects({"a": INT}, dependencies={"a": ["b"]}), "dependencies"),
    "if": ({**INT, "if": {"minimum": 3}, "then": {"maximum": 5}}, "if"),
    "contains": ({"type": "array", "contains": INT}, "contains"),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    "unevaluatedProperties": (objects({"a": INT}, unevaluatedProperties=False), "unevaluatedProperties"),
    "oneOf that overlaps": ({"oneOf": [{"type": "number"}, INT]}, "oneOf"),
    "a format that is not known": ({"type": "string", "format": "iri"}, "iri"),
    "looking ahead": ({"type": "string", "pattern": "^(?=a)"}, "look-ahead"),
    "patterns that overlap": ({"type": "object", "patternProperties": {"^x": INT, "y$": TEXT}}, "not disjoint"),
    "minProperties of two": ({"type": "object", "minProperties": 2, "additionalProperties": INT}, "minProperties"),
    "minProperties of two in a list": ({"type": "array", "items": {"minProperties": 2}}, "minProperties"),
    "a large const": ({"const": EXACT + 1}, "beyond 9007199254740992"),
    "large numbers in an enum": ({"enum": [{"id": [1234567890123456789]}, 5]}, "beyond 9007199254740992"),
    "a large bound": ({**INT, "minimum": EXACT + 1, "maximum": EXACT + 3}, "beyond 9007199254740992"),
    "an end close to a bound": ({"type": "number", "exclusiveMinimum": 3, "maximum": 3.5}, "exclusive bound"),
    "an end close to a bound of draft 4": (
        {"type": "number", "minimum": 3, "exclusiveMinimum": True, "maximum": 3.5},
        "exclusive bound",
    ),
    "an end close to a bound elsewhere": (
        {"type": "number", "allOf": [{"exclusiveMinimum": 3}, {"maximum": 3.5}]},
        "exclusive bound",
    ),
    "additionalItems beside prefixItems": (
        {"type": "array", "prefixItems": [TEXT], "items": INT, "additionalItems": False},
        "additionalItems",
    ),
    "options of the matcher": ({"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True}, "x-guidance"),
    "a keyword of another kind": ({"type": "object", "required": 3}, "value of another kind"),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_answers_of_a_schema_that_is_followed_validate(name: str) -> None:
    schema = json.loads(json.dumps(FOLLOWED[name]), parse_float=Decimal)
    validator = validator_for(schema, Draft202012Validator)(schema)
    texts = answers(FOLLOWED[name], 10)
    assert texts
    for text in texts:
        validator.validate(json.loads(text, parse_float=Decimal))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(name: str) -> None:
    schema, reason = REFUSED[name]
    with pytest.raises(InputError, match=reason):
        constraint(schema)


class Draws:
    """Schemas of random keywords, which meet as nobody would write them."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)

    def schema(self, depth: int = 3) -> Any:
        source = self._source
        kind = source.choice(["object", "object", "array", "leaf"]) if depth else "leaf"
        made: Any = {"object": self._object, "array": self._array, "leaf": self._leaf}[kind](depth - 1)
        if isinstance(made, dict) and depth and source.random() < 0.4:
            name = source.choice(["allOf", "anyOf", "oneOf", "enum"])
            made[name] = [1, "a", True, {"a": 1}] if name == "enum" else [self.schema(depth - 1) for _ in range(2)]
            made = dict(source.sample(sorted(made.items(), key=str), len(made)))
        return made

    def _some(self, **keywords: Any) -> dict[str, Any]:
        return {name: value for name, value in keywords.items() if self._source.random() < 0.4}

    def _object(self, depth: int) -> Any:
        names = self._source.sample("abcx", 2)
        others = self._source.choice([False, True, self.schema(depth)])
        counts = {"minProperties": self._source.randint(0, 2), "maxProperties": self._source.randint(1, 3)}
        parts = {"properties": {name: self.schema(depth) for name in names}, "required": self._source.sample("abcx", 1)}
        patterns = {"^x": self.schema(depth)}
        return {
            "type": "object",
            **self._some(**parts, additionalProperties=others, patternProperties=patterns, **counts),
        }

    def _array(self, depth: int) -> Any:
        first = [self.schema(depth)]
        return {"type": "array", **self._some(items=self.schema(depth), prefixItems=first, minItems=1, maxItems=2)}

    def _leaf(self, depth: int) -> Any:
        low, high = self._source.randint(-3, 3), self._source.choice([3, 3.5, 9])
        text = self._some(minLength=1, maxLength=3, pattern=self._source.choice(["^a", "b$", "[^a]"]))
        number = self._some(minimum=low, exclusiveMinimum=low, maximum=high, multipleOf=self._source.choice([0.5, 2]))
        ends: list[Any] = [{"enum": [1, "a", None]}, {"const": [1]}, {"type": "boolean"}, True, False]
        return self._source.choice([{"type": "string", **text}, {"type": "number", **number}, {**INT, **number}, *ends])


@pytest.mark.parametrize("seed", range(6))
def test_answers_of_drawn_schemas_validate_or_the_schema_is_refused(seed: int) -> None:
    drawn, followed = Draws(seed), 0
    for _ in range(120):
        schema = drawn.schema()
        if isinstance(schema, bool):
            continue
        try:
            texts = answers(schema, 4)
        except InputError:
            continue
        followed += bool(texts)
        for text in texts:
            Draft202012Validator(schema).validate(json.loads(text))
    assert followed > 20


CLOSED: list[tuple[Any, Any]] = [
    (objects({"a": INT}), objects({"a": INT}, additionalProperties=False)),
    (
        objects({"a": objects({"b": INT})}),
        objects({"a": objects({"b": INT}, additionalProperties=False)}, additionalProperties=False),
    ),
    (
        {
            "$defs": {"n": objects({"v": INT})},
            "type": "array",
            "items": {"$ref": "#/$defs/n", "description": "A node."},
        },
        {
            "$defs": {"n": objects({"v": INT}, additionalProperties=False)},
            "type": "array",
            "items": {"$ref": "#/$defs/n", "description": "A node."},
        },
    ),
    (
        {"allOf": [objects({"a": INT})], "default": 1},
        {"allOf": [objects({"a": INT}, additionalProperties=False)], "default": 1},
    ),
    (objects({"a": INT}, required=["b"]), objects({"a": INT, "b": True}, required=["b"], additionalProperties=False)),
    (objects({"properties": INT}), objects({"properties": INT}, additionalProperties=False)),
]
OPEN: list[Any] = [
    {"type": "object"},
    objects({"a": INT}, additionalProperties=True),
    objects({"a": INT}, additionalProperties=TEXT),
    objects({"a": INT}, required=["a"], minProperties=2),
    objects({"a": INT}, anyOf=[objects({"b": INT}), objects({"c": INT})]),
    {"allOf": [objects({"a": INT}), objects({"b": INT})]},
    objects({"a": INT}, **{"$ref": "#/$defs/n", "$defs": {"n": objects({"b": INT})}}),
    {"enum": [{"properties": 1}]},
]


@pytest.mark.parametrize(("schema", "closed"), [*CLOSED, *((schema, schema) for schema in OPEN)])
def test_objects_are_closed_that_say_nothing_of_other_properties_and_are_not_joined(schema: Any, closed: Any) -> None:
    assert enforceable(schema) == closed
    assert enforceable(json.dumps(schema)) == closed


@pytest.mark.parametrize(
    ("schema", "reason"), [("{", "no JSON"), ("[1]", "must be a JSON object"), ({1: {2}}, "no JSON")]
)
def test_what_is_no_schema_is_refused(schema: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        enforceable(schema)


def test_a_schema_in_a_grammar_keeps_its_spaces_and_no_other_option() -> None:
    tabs = '{"x-guidance": {"whitespace_flexible": false, "key_separator": ": "}, "type": "object", "required": ["a"]}'
    own = lark(f'start: "-" %json {tabs}', tokenizer(), len(PIECES))
    assert all(": " in str(walk(own, random.Random(seed))) for seed in range(3))
    for name in ("lenient", "coerce_one_of"):
        schema = json.dumps({"x-guidance": {name: True}, "type": "array", "uniqueItems": True})
        with pytest.raises(InputError, match="x-guidance"):
            lark(f"start: %json {schema}", tokenizer(), len(PIECES))
    lark(r'start: "%json" /[{]/', tokenizer(), len(PIECES))
