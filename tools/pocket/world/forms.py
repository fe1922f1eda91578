"""Forms: questions on charts, receipts and scenes that ask for JSON, with the true answer and its schema."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from saccade.pocket.sample import Facts, Sample
from saccade.pocket.sample import draw as draw_sample
from saccade.pocket.tasks.chart import HIGHEST
from saccade.pocket.words import BACKGROUNDS, COLOURS, COLUMNS, GOODS, QUESTIONS, ROWS, SHAPES, SIZES

Schema = dict[str, Any]
_MOST = 6  # entries of a list


@dataclass(frozen=True)
class FormSample:
    """A sample whose question shows the outline of a JSON answer, and the schema that its answer obeys."""

    sample: Sample
    schema: Schema


@dataclass(frozen=True)
class _Field:
    """One property: the names it may have, the schema of its value, and the value in an entry or in all facts."""

    names: tuple[str, ...]
    schema: Schema
    value: Callable[[Any], Any]


@dataclass(frozen=True)
class _Kind:
    """Properties of a task's answers: those of every entry of its list, and those beside the list."""

    lists: tuple[str, ...]
    entries: Callable[[Facts], list[dict[str, Any]]]
    always: tuple[_Field, ...]  # of an entry
    often: tuple[_Field, ...]  # of an entry
    beside: tuple[_Field, ...]
    fewest: int = 2  # properties of an entry


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def _whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _of(key: str) -> Callable[[Any], Any]:
    return lambda facts: facts[key]


def _most(names: str, values: str, choose: Callable[..., int]) -> Callable[[Any], Any]:
    """Return the name with the highest or lowest value, the first of several."""
    return lambda facts: facts[names][facts[values].index(choose(facts[values]))]


def _listed(names: str, values: str) -> Callable[[Facts], list[dict[str, Any]]]:
    return lambda facts: [
        {"name": name, "value": value, "place": place}
        for place, (name, value) in enumerate(zip(facts[names], facts[values], strict=True), 1)
    ]


def _count(facts: str) -> _Field:
    return _Field(("count", "number"), _whole(1, _MOST), lambda drawn: len(drawn[facts]))


_COLOUR, _WORD, _PLACE = _one_of(*COLOURS), _one_of(*GOODS), _whole(1, _MOST)
_KINDS: Mapping[str, _Kind] = {
    "chart": _Kind(
        ("bars", "columns", "chart"),
        _listed("colours", "values"),
        (
            _Field(("colour", "name", "bar"), _COLOUR, _of("name")),
            _Field(("value", "height", "reaches"), _whole(1, HIGHEST), _of("value")),
        ),
        (_Field(("place", "position"), _PLACE, _of("place")),),
        (
            _count("colours"),
            _Field(("highest", "tallest"), _COLOUR, _most("colours", "values", max)),
            _Field(("lowest", "shortest"), _COLOUR, _most("colours", "values", min)),
        ),
    ),
    "receipt": _Kind(
        ("items", "lines", "receipt"),
        _listed("goods", "prices"),
        (
            _Field(("item", "name", "word"), _WORD, _of("name")),
            _Field(("price", "dollars", "costs"), _whole(1, 9), _of("value")),
        ),
        (_Field(("line", "position"), _PLACE, _of("place")),),
        (
            _Field(("total", "sum"), _whole(1, 99), _of("total")),
            _count("goods"),
            _Field(("dearest", "most_expensive"), _WORD, _most("goods", "prices", max)),
            _Field(("cheapest",), _WORD, _most("goods", "prices", min)),
        ),
    ),
    "scene": _Kind(
        ("shapes", "things", "picture"),
        lambda facts: list(facts["things"]),
        (_Field(("shape", "form", "kind"), _one_of(*SHAPES), _of("shape")),),
        (
            _Field(("colour", "paint"), _COLOUR, _of("colour")),
            _Field(("size",), _one_of(*SIZES), _of("size")),
            _Field(("large", "is_large"), {"type": "boolean"}, lambda thing: thing["size"] == "large"),
            _Field(("row",), _one_of(*ROWS), _of("row")),
            _Field(("column", "side"), _one_of(*COLUMNS), _of("column")),
        ),
        (_count("things"), _Field(("background", "ground"), _one_of(*BACKGROUNDS), _of("background"))),
    ),
}
TASKS = tuple(_KINDS)  # tasks that can be asked as forms


def draw(seed: int, task: str) -> FormSample:
    """Draw form number `seed` of a task: the same picture as `saccade.pocket.draw`, the same text on every machine."""
    return ask(draw_sample(seed, task), Random(f"pocket/{task}/{seed}/form"))


def ask(sample: Sample, rng: Random) -> FormSample:
    """Ask for a sample's facts in a form with names, a selection and an order of its own."""
    kind = _KINDS[sample.task]
    optional = rng.sample(kind.often, rng.randint(max(0, kind.fewest - len(kind.always)), min(4, len(kind.often))))
    fields = [(rng.choice(field.names), field) for field in (*kind.always, *optional)]
    rng.shuffle(fields)
    entries = kind.entries(sample.facts)
    found: dict[str, tuple[Schema, Any]] = {}
    if rng.random() < 0.15:  # a list of each property
        for name, field in fields:
            found[name] = _list(field.schema), [field.value(entry) for entry in entries]
    else:
        item = _object({name: field.schema for name, field in fields})
        filled = [{name: field.value(entry) for name, field in fields} for entry in entries]
        found[rng.choice(kind.lists)] = _list(item), filled
    for field in rng.sample(kind.beside, rng.randint(0, 2)):
        found[rng.choice([name for name in field.names if name not in found])] = field.schema, field.value(sample.facts)
    order = rng.sample(list(found), len(found))
    schema = _object({name: found[name][0] for name in order})
    question = f"{rng.choice(QUESTIONS[sample.task])} Answer as JSON: {_compact(outline(schema))}"
    answer = _compact({name: found[name][1] for name in order})
    return FormSample(replace(sample, question=question, answer=answer), schema)


def outline(schema: Schema) -> Any:
    """Return the shape of a schema's answers: every property, with an empty value of its type."""
    if "enum" in schema:
        return type(schema["enum"][0])()
    if schema["type"] == "array":
        return [outline(schema["items"])]
    if schema["type"] == "object":
        return {name: outline(value) for name, value in schema["properties"].items()}
    return {"string": "", "integer": 0, "number": 0, "boolean": False}[schema["type"]]


def _object(properties: dict[str, Schema]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1, "maxItems": _MOST}


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
