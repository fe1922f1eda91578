"""Answers of every image-text-to-text architecture of transformers equal those of `generate`, or are refused."""

from __future__ import annotations

import pytest

from architectures import ARCHITECTURES, NAMES, PAGE, rows
from families import FAMILIES, FIRST_WORD, IMAGE, REFUSED, UNKNOWN, reference_greedy
from harness import build
from saccade.engine import Request
from saccade.errors import ModelError
from saccade.inputs.families import split
from saccade.target_model.adapter import Target
from saccade.target_model.selfcheck import self_check
from versions import DIFFUSION_GEMMA, MLLAMA


def test_every_architecture_of_transformers_has_a_case() -> None:
    assert NAMES.keys() <= {*FAMILIES, *UNKNOWN, *REFUSED, *ARCHITECTURES}


@MLLAMA
def test_cross_attended_pictures_leave_a_row_with_all_tokens_that_saw_them() -> None:
    """The second prompt begins with the words in front of the first one's picture, which they attended to."""
    case = ARCHITECTURES["mllama"]
    first = case.row_inputs("image", 0)
    target = Target(case.model())
    self_check(target)
    engine = build(target, Target(case.draft_model()), "chain")
    session = engine.open(1)
    ids = first["input_ids"].masked_fill(first["input_ids"] == IMAGE, FIRST_WORD)
    for inputs in (first, {"input_ids": ids}, first):
        (prompt,) = split(target.config, inputs)
        (output,) = engine.generate([Request(prompt)], max_new_tokens=24, session=session)
        assert output.tokens == reference_greedy(case.model(), inputs, 24)[0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pp_formulanet", "encoder-decoder"),
        pytest.param("diffusion_gemma", "one token after the other", marks=DIFFUSION_GEMMA),
        ("blip", "pixel_values for every new token"),
    ],
)
def test_a_model_that_does_not_continue_one_sequence_is_refused_when_it_is_adapted(name: str, reason: str) -> None:
    model = ARCHITECTURES[name].model()
    with pytest.raises(ModelError, match=reason):
        Target(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_does_as_the_table_says(name: str) -> None:
    (row,) = rows([name])
    assert row in PAGE.read_text(encoding="utf-8")
