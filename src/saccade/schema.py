"""JSON schemas before they are compiled: objects are closed, and what llguidance would not enforce is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from saccade.errors import InputError
from saccade.wording import first_line

EXACT, WIDEST = 2**53, (2**63 - 1, 2**64 - 1)
"""Numbers of a schema that are followed exactly, as llguidance reads them in float64: those up to the first, and of the
larger ones the maxima of int64 and uint64, at the first of which its whole numbers end."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("enum", "const", "default", "examples", "required", "x-guidance")
_APPLIED = {"allOf", "anyOf", "oneOf", "$ref"}
_NOTES = {"$defs", "definitions", "$schema", "$id", "title", "description", "default", "examples"}
SILENT = {"type", "deprecated", "discriminator", *_NOTES}
"""Keywords that name no properties and set no bounds."""
_VACUOUS: dict[str, tuple[Any, ...]] = {
    "propertyNames": ({}, True, {"type": "string"}),
    "uniqueItems": (False,),
    "format": ("binary", "password", "path", "file-path", "directory-path"),
}
"""Keywords that llguidance refuses -> their values that any value satisfies, as zod and Pydantic write them."""
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_INCLUSIVE = ("minimum", "maximum")


def enforceable(schema: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema with closed objects: without properties that it neither names nor allows explicitly.

    Raises:
        InputError: the schema is none, or the matcher would not enforce it.
    """
    try:
        copy = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
    except (ValueError, TypeError, RecursionError) as problem:
        raise InputError(f"The schema is no JSON ({first_line(problem)}); correct it.") from problem
    if not isinstance(copy, dict):
        raise InputError("A schema must be a JSON object, such as one with a type; wrap it in one.")
    for each in list(_subschemas(copy)):
        for name in [name for name, values in _VACUOUS.items() if name in each and each[name] in values]:
            del each[name]
    check_enforced(copy)
    every = list(_subschemas(copy))
    if not any(map(_is_joined, every)):
        for each in every:
            _close(each)
    return copy


def check_enforced(schema: Any, options: Collection[str] = ()) -> None:
    """Refuse what llguidance 1.9 accepts and does not enforce; ``options`` of it are allowed under ``x-guidance``."""
    every = list(_subschemas(schema))
    try:
        problem = next(filter(None, (_unenforced(each, options) for each in every)), None)
        # a value that several schemas constrain may have the bounds of any of them
        groups = [every] if any(map(_is_joined, every)) else [[each] for each in every]
        if problem is None and any(map(_admits_an_end, groups)):
            problem = "an exclusive bound is whole, with another bound less than 1 from it; move one of them"
    except (TypeError, ValueError) as wrong:
        problem = f"a keyword has a value of another kind ({first_line(wrong)}); correct it"
    if problem is not None:
        raise InputError(f"The schema cannot be enforced: {problem}.")


def _unenforced(schema: Mapping[str, Any], options: Collection[str]) -> str | None:
    """What of a schema is not enforced, the schemas in it left out, and what to do."""
    if schema.get("minProperties", 0) > len(set(schema.get("required", ()))) + 1:
        return "minProperties counts a name twice that is repeated; require names, or leave it out"
    if "additionalItems" in schema and "prefixItems" in schema:
        return "additionalItems annuls prefixItems; give items"
    numbers = _numbers(schema, "const", "enum", *_INCLUSIVE, *_EXCLUSIVE)
    if any(abs(number) > EXACT and number not in WIDEST for number in numbers):
        return f"a number is beyond {EXACT}; give a string with a pattern"
    if set(schema.get("x-guidance", ())) - set(options):
        return "x-guidance sets options of llguidance; leave it out"
    return None


def _admits_an_end(schemas: Collection[Mapping[str, Any]]) -> bool:
    """Whether llguidance may allow an exclusive bound itself."""
    bounds, ends = set[float](), set[float]()
    for each in schemas:
        bounds.update(_numbers(each, *_INCLUSIVE, *_EXCLUSIVE))
        ends.update(_numbers(each, *_EXCLUSIVE))
        if any(each.get(name) is True for name in _EXCLUSIVE):  # as in draft 4
            ends.update(_numbers(each, *_INCLUSIVE))
    return any(bound % 1 and ends & {math.floor(bound), math.ceil(bound)} for bound in bounds)


def _numbers(schema: Mapping[str, Any], *names: str) -> list[Any]:
    """Numbers in the values of keywords."""
    waiting, numbers = [schema.get(name) for name in names], list[Any]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, (int, float)) and not isinstance(each, bool):
            numbers.append(each)
        elif isinstance(each, (list, dict)):
            waiting += each.values() if isinstance(each, dict) else each
    return numbers


def _is_joined(schema: Mapping[str, Any]) -> bool:
    """Whether several schemas constrain one value: closed, each would refuse the properties that the others name."""
    applied = _APPLIED & schema.keys()
    if not applied:
        return False
    own = bool(schema.keys() - SILENT - _APPLIED)
    return own + len(applied - {"allOf"}) + len(schema.get("allOf", ())) > 1


def _close(schema: dict[str, Any]) -> None:
    """Leave an object the properties that it names or requires, unless it says what others may be or needs others."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and "additionalProperties" not in schema:
        named = properties | {name: True for name in schema.get("required", ()) if name not in properties}
        if len(named) >= schema.get("minProperties", 0):
            schema.update(properties=named, additionalProperties=False)


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas in it."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            yield each
            for name, inner in each.items():
                if name in _MAPS and isinstance(inner, dict):
                    waiting += inner.values()
                elif name not in _VALUES:
                    waiting.append(inner)
