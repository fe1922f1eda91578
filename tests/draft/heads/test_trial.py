"""A head whose drafts are nonsense is reported on first use, once; one that works is not."""

from __future__ import annotations

import warnings

import pytest
import torch

from families import FAMILIES
from heads_kit import POLICIES, engine, prompts, random_head, trained_head
from saccade.draft.heads.session import TRIAL
from saccade.engine import Request
from saccade.errors import SaccadeWarning
from saccade.verify.rule import Verdict


def requests() -> list[Request]:
    case = FAMILIES["llava"]
    return [Request(p) for p in prompts(case, case.inputs("image", rows=2))]


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_nonsense_is_reported_once(kind: str) -> None:
    under_test = engine("llava", random_head("llava", kind), POLICIES["chain"])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            under_test.generate(requests(), max_new_tokens=24)
    (one,) = [str(one.message) for one in found if one.category is SaccadeWarning]
    assert f" drafts of this {kind} head " in one
    assert "tokens were accepted, which is near chance" in one


def test_a_head_that_works_is_not_reported() -> None:
    under_test = engine("llava", trained_head("llava", "eagle3"), POLICIES["chain"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", SaccadeWarning)
        for _ in range(4):
            under_test.generate(requests(), max_new_tokens=24)


def test_too_few_drafts_are_not_judged() -> None:
    drafter = engine("llava", random_head("llava", "eagle3"), POLICIES["chain"]).drafter
    nothing = Verdict(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, dtype=torch.long), torch.zeros(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SaccadeWarning)
        for _ in range(TRIAL - 1):
            drafter.count_accepted(nothing)
    with pytest.warns(SaccadeWarning, match="no tokens were accepted, which is near chance"):
        drafter.count_accepted(nothing)
