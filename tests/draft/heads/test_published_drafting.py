"""Published EAGLE-3 heads draft as they would before they were released, wherever a head can be given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from heads_kit import POLICIES, engine, kind_of_prompt, prompts, random_head, recorded, target
from published_kit import KNOWN, assert_taken_everywhere, original, randomised, released
from transformers.generation import logits_process as hf

import checkpoints
from families import FAMILIES
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.head import build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.heads.store import kind_in, load_head
from saccade.draft.trees.policy import DrawProposer
from saccade.engine import Request
from saccade.target_model.selfcheck import LogitMap
from saccade.verify.lossless import Uniforms


def requests(name: str) -> list[Request]:
    case = FAMILIES[name]
    return [Request(prompt) for prompt in prompts(case, case.inputs(kind_of_prompt(name), rows=2))]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama", "llava", "qwen2_5_vl"])
def test_answers_and_drafts(name: str, policy: str, tmp_path: Path) -> None:
    ours = original(name)
    head = load_head(released(ours, tmp_path, target(name)), target(name))
    kind, asked = kind_of_prompt(name), [request.prompt for request in requests(name)]
    outputs, steps = recorded(name, head, POLICIES[policy], asked, n=12)
    assert [o.tokens for o in outputs] == FAMILIES[name].reference(kind, rows=2, n=12)
    _, expected = recorded(name, ours, POLICIES[policy], asked, n=12)
    known = set(ours.token_ids.tolist())
    for step, same_step in zip(steps, expected, strict=True):
        for level, same_level in zip(step.levels, same_step.levels, strict=True):
            for a, b in zip(level, same_level, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-5)  # weights may lie otherwise in memory
        for tokens, _, _ in step.levels[1:]:
            assert known.issuperset(tokens.flatten().tolist())


def test_trees_wider_than_the_vocabulary() -> None:
    head = randomised(random_head("llava", "eagle3", own_vocabulary=2))  # type: ignore[arg-type]
    for policy in POLICIES.values():
        outputs = engine("llava", head, policy).generate(requests("llava"), max_new_tokens=12)
        assert [o.tokens for o in outputs] == FAMILIES["llava"].reference("image", rows=2, n=12)


@pytest.mark.parametrize(
    "warper",
    [
        hf.TemperatureLogitsWarper(0.5),
        hf.TopKLogitsWarper(60),
        hf.TopPLogitsWarper(0.9),
        hf.MinPLogitsWarper(0.05),
        hf.TypicalLogitsWarper(0.9),
        hf.EpsilonLogitsWarper(0.001),
        hf.EtaLogitsWarper(0.001),
        hf.InfNanRemoveLogitsProcessor(),
    ],
    ids=lambda warper: type(warper).__name__,
)
def test_tokens_that_it_does_not_know_are_never_drawn(warper: Any) -> None:
    head = original()
    logits = HeadDrafter(head, target("llava"), POLICIES["chain"]).logits(torch.randn(3, 2, 64)).detach()
    unknown = torch.ones(logits.shape[-1], dtype=torch.bool).index_fill(0, head.token_ids, False)
    assert logits[..., unknown].isneginf().all()
    uniforms = Uniforms([torch.Generator().manual_seed(row) for row in range(3)], (1, 1), 16, logits.device)
    tokens, q = DrawProposer(lambda scores: warper(None, scores), uniforms).children(logits, 3)
    assert q is not None
    assert torch.isfinite(q).all()
    assert not q[..., unknown].any()
    assert set(tokens.flatten().tolist()) <= set(head.token_ids.tolist())


def test_the_logits_of_its_own_head_are_not_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.draft.heads.session.logit_map", lambda target: LogitMap(3.0))
    states = torch.randn(1, 4, 64)
    head = original()
    got = HeadDrafter(head, target("llava"), POLICIES["chain"]).logits(states)
    torch.testing.assert_close(got, head.logits(states, torch.nn.Identity()))


# --------------------------------------------------------------------------- where a head can be given


@pytest.fixture(scope="module")
def for_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    owner = checkpoints.vlm("llava").target
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = build_head(HeadConfig.from_target(owner, "eagle3", own_vocabulary=KNOWN))
    assert isinstance(head, Eagle3)
    return released(randomised(head), tmp_path_factory.mktemp("published") / "EAGLE3-tiny", owner)


def test_wherever_a_head_can_be_given(for_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kind_in(for_checkpoint) == kind_in(str(for_checkpoint)) == "eagle3"
    assert_taken_everywhere(for_checkpoint, "eagle3", capsys)
