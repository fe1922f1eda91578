"""Published EAGLE, EAGLE-2 and MSD heads draft from what their files say, wherever a head can be given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from heads_kit import POLICIES, Text, kind_of_prompt, prompts, recorded, target
from published_eagle_kit import CASES, by_hand, original, released
from published_kit import assert_taken_everywhere, randomised

import checkpoints
from families import FAMILIES
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.eagle import Eagle2
from saccade.draft.heads.head import build_head
from saccade.draft.heads.store import load_head


@torch.no_grad()
@pytest.mark.parametrize("policy", ["chain", "dynamic"])
@pytest.mark.parametrize("case", CASES)
def test_answers_and_drafts(case: str, policy: str, tmp_path: Path) -> None:
    """Answers are the target's; drafts are what the files say, of a whole prompt, and of a guess behind it."""
    name, kind, _, _ = CASES[case]
    head = load_head(released(original(case), tmp_path, target(name)), target(name))
    family, prompt_kind = FAMILIES[name], kind_of_prompt(name)
    asked = prompts(family, family.inputs(prompt_kind, rows=2))
    outputs, steps = recorded(name, head, POLICIES[policy], asked, n=12)
    assert [o.tokens for o in outputs] == family.reference(prompt_kind, rows=2, n=12)

    lm_head, embed = target(name).model.get_output_embeddings(), target(name).model.get_input_embeddings()
    for row in range(2):
        inputs, step = family.row_inputs(prompt_kind, row), steps[1]
        text = Text.of(name, inputs, step.emitted[row])
        assert text.visual.any() == family.is_visual
        alone = text.visual[1:] if kind == "msd" else torch.zeros_like(text.visual[1:])
        out = by_hand(tmp_path, text.states[:-1], text.embeddings[1:], alone)
        nodes = dict(step.nodes(row))
        torch.testing.assert_close(nodes[()], lm_head(out[-1]), atol=1e-3, rtol=1e-3)
        (token,) = path = next(path for path in nodes if len(path) == 1)
        out = by_hand(
            tmp_path,
            torch.cat([text.states[:-1], out[-1:]]),
            torch.cat([text.embeddings[1:], embed(torch.tensor([token]))]),
            torch.cat([alone, torch.tensor([False])]),
        )
        torch.testing.assert_close(nodes[path], lm_head(out[-1]), atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def for_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    owner = checkpoints.vlm("llava").target
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = build_head(HeadConfig.from_target(owner, "msd", norms="none", bias=True))
    assert isinstance(head, Eagle2)
    return released(randomised(head), tmp_path_factory.mktemp("published") / "MSD-tiny", owner, binary=True)


def test_wherever_a_head_can_be_given(for_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_taken_everywhere(for_checkpoint, "msd", capsys)
