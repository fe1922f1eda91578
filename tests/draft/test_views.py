"""What each view puts before the draft model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from families import FAMILIES, VISUAL_FAMILIES
from numerals import NEWLINE, Numerals
from saccade.draft.ensemble.views import Multimodal, TextOnly, make_views, pooled
from saccade.errors import MethodError
from saccade.inputs.families import split, visual_mask
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target

WORDS = Numerals()


@cache
def model(name: str) -> Target:
    return Target(FAMILIES[name].model())


def prompts(name: str, kind: str = "image", rows: int = 3) -> list[Prompt]:
    return split(model(name).config, FAMILIES[name].inputs(kind, rows))


def visuals(name: str, prompt: Prompt) -> int:
    return int(visual_mask(model(name).config, prompt.ids).sum())


# --------------------------------------------------------------------------- M and T


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_multimodal_view_is_the_prompt_itself(name: str) -> None:
    for kind in FAMILIES[name].kinds:
        for prompt in prompts(name, kind):
            assert Multimodal().read(prompt) is prompt


@pytest.mark.parametrize("name", VISUAL_FAMILIES)
def test_the_text_view_has_one_newline_for_every_medium(name: str) -> None:
    view = TextOnly(model(name).config, WORDS)
    for kind in FAMILIES[name].kinds:
        for prompt in prompts(name, kind):
            seen = view.read(prompt)
            assert not seen.media
            assert visuals(name, seen) == 0
            assert seen.ids.count(NEWLINE) == len(prompt.media)


# --------------------------------------------------------------------------- all


@pytest.mark.parametrize("name", list(FAMILIES))
def test_text_reads_the_same_in_every_view(name: str) -> None:
    (prompt,) = prompts(name, "text", 1)
    views: list[Any] = [Multimodal(), TextOnly(model(name).config, WORDS)]
    if name in VISUAL_FAMILIES:
        views.append(pooled(model(name)))
    assert all(view.read(prompt) == prompt for view in views)


@pytest.mark.parametrize("names", ["", "MM", "MX", "mt"])
def test_unknown_views_are_refused(names: str) -> None:
    class Processor:
        config = model("llava").config
        tokenizer = WORDS

    with pytest.raises(MethodError, match="one or more letters of MTCPR"):
        make_views(names, model("llava"), Processor())  # type: ignore[arg-type]
    assert [view.name for view in make_views("PTM", model("llava"), Processor())] == list("PTM")  # type: ignore[arg-type]
