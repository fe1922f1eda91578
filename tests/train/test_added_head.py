"""A head kind is one file and one registry entry: this file is one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from families import FAMILIES
from heads_kit import LENGTH, POLICIES, engine, prompts, target
from processes import exit_code_of, run_anew
from saccade.draft.heads.head import Head, HeadConfig, Placement, Step, build_head
from saccade.draft.heads.registry import HEAD_KINDS, HeadKind, head_class
from saccade.draft.heads.session import HeadDrafter, HeadEntries
from saccade.draft.heads.store import load_head
from saccade.engine import Request
from saccade.train import Listed, Trainer
from saccade.train.objectives.entries import Entries, LMHead
from saccade.train.objectives.losses import Tally, draft_loss
from saccade.train.recipe import read_recipe


class Mixed(Head):
    """A head without attention: a linear map of feature and embedding."""

    kind: ClassVar[str] = "mixed"
    defaults: ClassVar[Mapping[str, Any]] = {"gain": 1.0}
    blocks = 0

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)

    def forward(self, features: Tensor, embeddings: Tensor, at: Placement, step: Step = 0) -> Tensor:
        mixed: Tensor = self.fc(torch.cat([features, embeddings], -1))
        return features + self.config.options["gain"] * mixed


class MixedEntries(HeadEntries):
    """As any head's."""


@dataclass(frozen=True, slots=True)
class MixedObjective:
    TERMS: ClassVar[tuple[str, ...]] = ("states",)

    states: float = 1.0

    def __call__(self, head: Head, entries: Entries, lm_head: LMHead, draft_steps: int) -> Tally:
        return draft_loss(head, entries, lm_head, draft_steps, {"states": self.states})


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    head, objective, entries = (f"{__name__}:Mixed{part}" for part in ("", "Objective", "Entries"))
    parts = HeadKind(head, objective, entries=entries, recipe="eagle2")
    monkeypatch.setitem(HEAD_KINDS, "mixed", parts)


@pytest.mark.usefixtures("_registered")
def test_an_added_head_drafts_losslessly() -> None:
    case = FAMILIES["llava"]
    head = build_head(HeadConfig.from_target(target("llava"), "mixed", gain=0.5))
    drafter = engine("llava", head, POLICIES["chain"])
    assert isinstance(drafter.drafter, HeadDrafter)
    assert drafter.drafter.entries is MixedEntries
    asked = [Request(prompt) for prompt in prompts(case, case.inputs("image", rows=2))]
    answers = drafter.generate(asked, max_new_tokens=LENGTH)
    expected = case.reference("image", rows=2)
    assert [answer.tokens for answer in answers] == [answer[:LENGTH] for answer in expected]


@pytest.mark.usefixtures("_registered")
def test_an_added_head_trains_and_is_loaded_again(tmp_path: Path) -> None:
    recipe = read_recipe("mixed").with_settings(
        {"stage1.steps": 2, "stage1.warmup": 0, "batch_size": 4, "validation_samples": 0, "head.gain": 0.5}
    )
    assert (recipe.kind, recipe.stages[0].draft_steps) == ("mixed", 3)
    owner = target("llava")
    case = FAMILIES["llava"]
    source = Listed((prompt, range(20, 26)) for prompt in prompts(case, case.inputs("image", rows=12)))
    trainer = Trainer(owner, recipe, source, tmp_path, say=lambda _: None)
    before = trainer.learner.module.fc.weight.clone()  # type: ignore[union-attr]
    head = load_head(trainer.run().head, owner)
    assert isinstance(head, Mixed)
    assert head.config.options == {"gain": 0.5}
    assert not torch.equal(head.fc.weight, before)


def test_every_registered_class_exists_and_bears_its_kind() -> None:
    assert [head_class(kind).kind for kind in HEAD_KINDS] == list(HEAD_KINDS)


def test_listing_heads_imports_no_torch() -> None:
    code = "import sys, saccade.draft.heads.registry; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_drafting_imports_no_training() -> None:
    code = (
        "import sys\n"
        "from saccade.draft.heads.registry import HEAD_KINDS, head_class, part_of\n"
        "for kind in HEAD_KINDS: head_class(kind), part_of(kind, 'draft'), part_of(kind, 'entries')\n"
        "assert not [name for name in sys.modules if name.startswith('saccade.train')]\n"
    )
    assert exit_code_of(lambda: run_anew(code)) == 0
