"""The built-in adapter for JSON: what it is trained on, and that it ends forms without bounds."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

import saccade
from saccade.pocket import draw, target_path
from tools.pocket.batches import IGNORED
from tools.pocket.json_answers import SHARES, JsonBatches, form_of
from tools.pocket.recipe import Schedule

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


def many(name: str, entry: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A schema of an object with a list of entries, as Pydantic writes it, without any bound."""
    item = {"type": "object", "properties": entry, "required": list(entry)}
    properties = {name: {"type": "array", "items": item}, **more}
    return {"type": "object", "properties": properties, "required": list(properties)}


SCHEMAS = {
    "receipt": many("items", {"name": TEXT, "price": NUMBER}, total=NUMBER),
    "chart": many("bars", {"colour": TEXT, "value": NUMBER}),
    "scene": many("shapes", dict.fromkeys(("size", "colour", "shape", "row", "column"), TEXT)),
}


@pytest.fixture(scope="module")
def vlm() -> saccade.VLM:
    return saccade.load("pocket", adapters={"json": "pocket"}).using(adapter="json")


@pytest.mark.parametrize("task", SCHEMAS)
def test_the_built_in_adapter_fills_a_form_without_bounds_and_ends_it(vlm: saccade.VLM, task: str) -> None:
    schema = saccade.grammar.json_schema(SCHEMAS[task], vlm.processor.tokenizer, vlm.target.vocab_size)
    names = next(iter(SCHEMAS[task]["properties"]))
    for seed in (900_500, 900_503):
        sample = draw(seed, task)
        truth = form_of(task, sample.facts)
        output = vlm.generate(sample.question, images=[sample.image], max_new_tokens=300, logits_processor=[schema])
        assert output.finish_reason == "eos"
        entries = json.loads(output.text)[names]
        assert set(map(frozenset, entries)) == set(map(frozenset, truth[names]))  # their properties
        right = {value for entry in truth[names] for value in entry.values()}
        assert {value for entry in entries for value in entry.values()} & right


def test_batches_hold_forms_of_one_task_whose_values_weigh_more() -> None:
    tokenizer = Tokenizer.from_file(str(target_path() / "tokenizer.json"))
    make = JsonBatches("test", Schedule(steps=1, batch=2, rate=1e-3, warmup=1, decisive=3.0), tokenizer)
    seen = set()
    for number in range(6):
        batch = make(number)
        assert batch.weights is not None
        answers = [tokenizer.decode(row[row != IGNORED].tolist()) for row in batch.targets]
        (shape,) = {tuple(json.loads(answer)) for answer in answers}
        seen.add(shape)
        assert set(batch.weights.flatten().tolist()) == {1.0, 3.0}
    assert len(seen) > 1
    assert set(SHARES) == set(SCHEMAS)
