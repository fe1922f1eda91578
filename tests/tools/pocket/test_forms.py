"""Forms: questions that outline a schema, with true answers of it, and the target's answers for the draft."""

import json
from pathlib import Path
from random import Random

import pytest
import torch
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from saccade.pocket import draft_path, draw, target_path
from tools.pocket.batches import END
from tools.pocket.forms import FormBatches, answers, guessed, passes
from tools.pocket.models import PocketModel
from tools.pocket.recipe import Schedule
from tools.pocket.world import forms

SCHEDULE = Schedule(steps=1, batch=1, rate=1e-3, warmup=1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(target_path() / "tokenizer.json"))


@pytest.mark.parametrize("task", forms.TASKS)
def test_true_answers_obey_the_schema_that_the_question_outlines(task: str) -> None:
    asked = [forms.draw(seed, task) for seed in range(50)]
    for form in asked:
        answer = json.loads(form.sample.answer)
        Draft202012Validator(form.schema).validate(answer)
        assert list(answer) == list(form.schema["properties"])
        shown = json.loads(form.sample.question.split("Answer as JSON: ")[1])
        assert shown == forms.outline(form.schema)
    assert len({json.dumps(form.schema) for form in asked}) > 40


def test_a_form_asks_about_the_picture_of_its_seed() -> None:
    form, sample = forms.draw(3, "receipt"), draw(3, "receipt")
    assert form.sample.image.tobytes() == sample.image.tobytes()
    goods = {name for name in sample.facts["goods"] if f'"{name}"' in form.sample.answer}
    assert goods == set(sample.facts["goods"])


def test_the_target_answers_under_the_schema_and_a_stopped_run_goes_on(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "answers.pt"
    one = answers(path, 1)
    both = answers(path, 2)
    assert both[0] == one[0]
    for seed, task, ids in both:
        Draft202012Validator(forms.draw(seed, task).schema).validate(json.loads(tokenizer.decode(ids)))
    make = FormBatches(SCHEDULE, tokenizer, both)
    drawn = {tuple(make(number).targets[0, make(number).targets[0] >= 0].tolist()) for number in range(8)}
    assert drawn == {(*ids, END) for *_, ids in both}


def test_a_guess_under_the_schema_is_right_wherever_a_token_is_forced(tokenizer: Tokenizer) -> None:
    draft = PocketModel.from_pretrained(draft_path(), dtype=torch.float32)
    true = tokenizer.encode(forms.draw(1, "receipt").sample.answer).ids
    told = guessed(draft, AutoTokenizer.from_pretrained(target_path()), (1, "receipt", true))
    assert len(told) == len(true) + 1
    assert all(under for _, under, forced in told if forced)
    assert 0 < sum(not forced for *_, forced in told) < len(told) / 2
    assert not all(right for right, *_ in told)


@pytest.mark.parametrize(
    ("right", "forced", "needed"),
    [
        ("1111111", "0000000", 1),  # the first token is the prompt's, five guesses, and the target's own
        ("11111111", "0000000", 2),
        ("1011011", "0000000", 3),
        ("0000000", "0111111", 1),
        ("11111111", "01000000", 1),  # a forced token takes no guess
        ("0000", "0000", 3),
    ],
)
def test_passes_are_counted_as_chains_of_five_would_need_them(right: str, forced: str, needed: int) -> None:
    forced = forced.ljust(len(right), "0")
    assert passes([c == "1" for c in right], [c == "1" for c in forced]) == needed


def test_the_same_names_and_order_for_another_picture() -> None:
    one, other = (forms.ask(draw(seed, "chart"), Random("form")) for seed in (1, 2))
    assert one.schema == other.schema
    assert one.sample.answer != other.sample.answer
