"""PARD: a draft in one pass equals a reference without cache, and answers equal `generate`'s."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling_kit import OPTIONS, UNLIKELY, p_of_answers, sampled, small_model
from torch import Tensor

import harness
import saccade
import saccade.hf
from checkpoints import llama, picture, ready, tokenizer
from checkpoints import vlm as vlm_of
from families import FAMILIES, Inputs, reset_rope_deltas
from harness import POLICIES, assert_equals_generate, course, draft, prompts, requests, target
from heads_kit import Recording
from saccade.draft.lookup import PromptLookup
from saccade.draft.merged import MergedDrafter
from saccade.draft.pard import PardDrafter, PardDraftSession
from saccade.draft.trees.oneshot import OneShotTree
from saccade.draft.trees.policy import Chain
from saccade.draft.trees.sage import SageTree
from saccade.engine import Engine, Request
from saccade.errors import ModelError
from saccade.model_spec import ModelSpec
from saccade.target_model.adapter import Target
from saccade.verify.loose import RandomLoosening
from saccade.vlm import check

MASK, DEPTH = 7, 4
TREES = {
    **POLICIES,
    "sage": SageTree(),
    "oneshot": OneShotTree(total=6, floor=0.0, max_depth=DEPTH),
    "merged": POLICIES["dynamic"],
    "narrow": OneShotTree(total=2, floor=0.0, max_depth=16),  # fewer nodes than masks
}
NAMES = ("llama", "mistral", "llava", "qwen2_5_vl")


def drafter(name: str, policy: Any) -> PardDrafter:
    return PardDrafter(draft(name), TREES.get(policy, policy), mask=MASK)


# --------------------------------------------------------------------------- the reference


def proposals(name: str, kind: str, policy: Any, rows: int = 3) -> list[tuple[int, list[int], list[Tensor]]]:
    """Rows, their answers so far, and the logits ``[W, V]`` of every depth; half of the drafts are accepted."""
    recording = Recording(TREES[policy])
    method = Engine(target(name), drafter(name, recording), RandomLoosening(0.5))
    outputs, found = harness.proposals(method, requests(name, kind, rows), 14)
    assert sum(output.stats.accepted_tokens for output in outputs) > rows
    levels = [
        [logits[place] for _, _, logits in step.levels] for step in recording.steps for place in range(len(step.rows))
    ]
    # The first root is the prompt's last token.
    return [(row, shown[1:], of_depths) for (row, shown, _), of_depths in zip(found, levels, strict=True)]


@torch.no_grad()
def marginals(name: str, inputs: Inputs, answer: Sequence[int], depth: int) -> Tensor:
    """Logits ``[depth, V]`` of one forward without cache over prompt, answer and masks."""
    more = torch.tensor([[*answer, *[MASK] * (depth - 1)]])
    added = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    types = FAMILIES[name].types
    added |= {types: torch.zeros_like(more)} if types else {}
    model = reference(name)
    reset_rope_deltas(model)
    whole = {**inputs, **{key: torch.cat([inputs[key], tensor], 1) for key, tensor in added.items()}}
    return model(**whole).logits[0, -depth:]  # type: ignore[no-any-return]


@cache
def reference(name: str) -> Any:
    return FAMILIES[name].draft_model()


def worst(name: str, kind: str, policy: Any = "chain", rows: int = 3) -> float:
    """Largest difference of a depth's logits from the reference's, over all nodes that are expanded."""
    found = proposals(name, kind, policy, rows)
    assert {row for row, _, _ in found} == set(range(rows))
    assert max(len(levels) for _, _, levels in found) == DEPTH
    return max(
        float((level - expected).abs().max())
        for row, answer, levels in found
        for level, expected in zip(
            levels, marginals(name, FAMILIES[name].row_inputs(kind, row), answer, len(levels)), strict=True
        )
    )


CLOSE = 1e-3
"""Sums in another order; logits of tiny models spread over units, and mistakes of tools/plants.toml are above .05."""


@pytest.mark.parametrize("policy", ["chain", "dynamic", "oneshot"])
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in NAMES for kind in FAMILIES[name].kinds])
@pytest.mark.singly
def test_every_depth_has_the_logits_of_one_forward_over_text_and_masks(name: str, kind: str, policy: str) -> None:
    assert worst(name, kind, policy) < CLOSE


# --------------------------------------------------------------------------- answers


@pytest.mark.parametrize("policy", [*POLICIES, "sage", "oneshot", "narrow", "merged"])
@pytest.mark.parametrize(("name", "rows"), [(name, rows) for name in NAMES for rows in (1, 8)])
@pytest.mark.singly
def test_answers_equal_generate(name: str, rows: int, policy: str) -> None:
    helper: Any = drafter(name, policy)
    if policy == "merged":
        helper = MergedDrafter(helper, PromptLookup())
    outputs = assert_equals_generate(Engine(target(name), helper), name, rows=rows)
    assert 0 < sum(o.stats.accepted_tokens for o in outputs) < sum(o.stats.drafted_tokens for o in outputs)


def test_later_turns_reuse_the_prefix_and_draft_alike() -> None:
    name, engine = "llava", Engine(target("llava"), drafter("llava", "chain"))
    session, case = engine.open(1), FAMILIES["llava"]
    first = engine.generate(requests(name, "image", 1), max_new_tokens=12, session=session)[0]
    (longer,) = prompts(case, case.continued("image", 0, first.tokens, follow_up="text"))
    again, alone = (engine.generate([Request(longer)], max_new_tokens=12, session=s)[0] for s in (session, None))
    assert again.stats.reused_tokens > 0
    assert course(again) == course(alone)


@pytest.mark.slow
def test_a_q_of_another_depth_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted mistake: draws of one depth, verified with the distribution of another."""
    honest = PardDraftSession.propose

    def propose(self: Any, *given: Any) -> Any:
        tree = honest(self, *given)
        tree.q = tree.q.roll(-1, 1)
        return tree

    monkeypatch.setattr(PardDraftSession, "propose", propose)
    model, helper = small_model(1), PardDrafter(Target(small_model(2)), Chain(3), mask=2)
    outputs = sampled(Engine(Target(model), helper), **OPTIONS["as_it_is"])
    assert p_of_answers(outputs, model, **OPTIONS["as_it_is"]) < UNLIKELY


# --------------------------------------------------------------------------- checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A language model whose config.json names a mask token, as those of AMD do."""
    return llama(tmp_path / "pard", seed=3, padded=4, pard_token=len(tokenizer()) + 1, spd_type="pard")


def renamed(folder: Path, token: Any) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pard_token": token}))
    return str(folder)


def test_a_released_folder_drafts_by_default_beside_pictures(folder: Path) -> None:
    plain, vlm = vlm_of("llava"), saccade.load(ready("llava"), folder)
    assert (vlm.method, vlm.options["gamma"], vlm.lossless) == ("pard", 12, True)
    helper: Any = vlm.engine.drafter
    assert (type(helper), helper.mask, helper.vocab_size) == (PardDrafter, len(tokenizer()) + 1, len(tokenizer()))
    asked = ["What?", "And what was it before?"], [[picture(1)], []]
    expected = [output.tokens for output in plain.generate(*asked, max_new_tokens=12)]
    for method in (vlm, vlm.using("pard", tree="dynamic"), vlm.using("pard", lookup_tokens=4), vlm.using("chain")):
        outputs = method.generate(*asked, max_new_tokens=12)
        assert [output.tokens for output in outputs] == expected
        assert all(output.stats.drafted_tokens for output in outputs)
    assert saccade.load(ready("llava"), folder, gamma=3, tree="confident").method == "pard"
    assert saccade.load(ready("llava"), folder, views="T").method == "chain"
    assert saccade.load(ready("llava"), folder, keep_images=0.5).method == "auto"


def test_inside_generate_it_is_the_default_too(folder: Path) -> None:
    model, helper = (saccade.loading.load_model(each) for each in (ready("llama"), folder))
    ids = torch.tensor([[3, 5, 8, 2]])
    speculation = saccade.hf.speculate(helper)
    given, again = (model.generate(ids, max_new_tokens=12, **more) for more in ({}, {"custom_generate": speculation}))
    assert torch.equal(given, again)
    assert type(speculation._engine_for(model).drafter) is PardDrafter


@pytest.mark.parametrize("token", [10_000, -1, "<mask>", 7.0, True])
def test_a_damaged_folder_is_refused_before_weights_are_read(folder: Path, token: Any) -> None:
    damaged = renamed(folder, token)
    with pytest.raises(ModelError, match=r"^The pard_token of .* is .*, which is not a whole number from 0 to 26"):
        check(ModelSpec(ready("llava"), damaged))


def test_a_drafter_without_a_mask_token_is_refused_before_weights_are_read() -> None:
    with pytest.raises(
        ModelError, match=r"^Method pard needs .* names no pard_token; choose another drafter, or .*\.$"
    ):
        check(ModelSpec(ready("llava"), ready("llama"), "pard"))
