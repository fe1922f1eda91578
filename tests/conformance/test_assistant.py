"""Gemma 4's assistants: the tokens of transformers' own candidate generator, and answers of `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from sampling_kit import ROWS, TREES, assert_follows
from transformers import GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

import harness
from assistants import assistant, assistant_model, small_assistant, small_target
from families import FAMILIES, Inputs, pristine
from harness import POLICIES, assert_equals_generate, requests, target
from saccade.draft.assistant import AssistantDrafter
from saccade.draft.lookup import PromptLookup
from saccade.draft.merged import MergedDrafter
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine
from saccade.engine.costs import Pacer, Trials
from saccade.errors import ModelError
from saccade.loading import adapt
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.verify.loose import RandomLoosening

NAMES = ("gemma4", "gemma4_unified")
KINDS = [(name, kind) for name in NAMES for kind in FAMILIES[name].kinds]
GAMMA = 3


def drafter(name: str, policy: Any, ordered: bool = False) -> AssistantDrafter:
    return AssistantDrafter(assistant(name, ordered), target(name), POLICIES.get(policy, policy))


def extended(inputs: Inputs, answer: Sequence[int]) -> Inputs:
    more = torch.tensor([list(answer)], dtype=torch.long)
    added = {"input_ids": more, "attention_mask": torch.ones_like(more), "mm_token_type_ids": torch.zeros_like(more)}
    return {**inputs, **{name: torch.cat([inputs[name], tensor], 1) for name, tensor in added.items()}}


@torch.no_grad()
def candidates(name: str, inputs: Inputs, answer: Sequence[int], ordered: bool = False) -> list[int]:
    """Transformers' candidates after an answer, whose last token the target has not read."""
    model, helper = pristine(name), assistant(name, ordered).model
    helper.generation_config.num_assistant_tokens = GAMMA
    generation = GenerationConfig(max_length=10_000)
    embed = model.get_input_embeddings()
    whole = extended(inputs, answer)
    generator = SinglePositionMultiTokenCandidateGenerator(
        assistant_model=helper,
        target_model_input_embeddings=embed,
        generation_config=generation,
        input_ids=whole["input_ids"],
        model_kwargs={},  # of transformers 5.17, ignored by later ones
    )
    outputs = model(**extended(inputs, answer[:-1]), output_hidden_states=True, return_shared_kv_states=True)
    ids, _ = generator.get_candidates(
        whole["input_ids"], {"attention_mask": whole["attention_mask"]}, outputs, False, whole["input_ids"].shape[1] - 2
    )
    return ids[0, whole["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


def proposals(name: str, kind: str, ordered: bool = False, new: int = 16) -> list[tuple[int, list[int], list[int]]]:
    """Rows, their answers so far, and the chain drafted after these; half of the drafts are accepted."""
    method = Engine(target(name), drafter(name, Chain(GAMMA), ordered), RandomLoosening(0.5))
    outputs, found = harness.proposals(method, requests(name, kind), new)
    assert sum(output.stats.accepted_tokens for output in outputs) > 2
    chains = [(row, answer, tree.tokens[0, 1:].tolist()) for row, answer, tree in found]
    return [each for each in chains if len(each[2]) == GAMMA]


def differing(name: str, kind: str, found: Sequence[tuple[int, list[int], list[int]]], ordered: bool = False) -> int:
    case = FAMILIES[name]
    return sum(
        drafted != candidates(name, case.row_inputs(kind, row), answer, ordered) for row, answer, drafted in found
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*each, marks=[] if each[1] in ("image", "text") else [pytest.mark.slow]) for each in KINDS],
)
def test_a_chain_proposes_the_tokens_of_transformers(name: str, kind: str) -> None:
    found = proposals(name, kind, new=10)
    assert len(found) > 8
    assert {row for row, _, _ in found} == {0, 1, 2}
    assert not differing(name, kind, found)


def test_ordered_embeddings_propose_them_too() -> None:
    assert not differing("gemma4", "text", proposals("gemma4", "text", ordered=True, new=8), ordered=True)


@pytest.mark.parametrize("policy", ["chain", "dynamic", "static", "merged"])
@pytest.mark.parametrize(("name", "kind", "rows"), [(n, k, r) for n, k in KINDS for r in (1, 3)])
@pytest.mark.singly
def test_answers_equal_generate(name: str, kind: str, rows: int, policy: str) -> None:
    helper: Any = drafter(name, "dynamic" if policy == "merged" else policy)
    if policy == "merged":
        helper = MergedDrafter(helper, PromptLookup())
    outputs = assert_equals_generate(Engine(target(name), helper), name, kind, rows)
    assert sum(output.stats.drafted_tokens for output in outputs) > 0


class Seldom(Pacer):
    """Drafts in every other step."""

    _turn = 0

    def lengths(self, rows: Sequence[Trials], others: int = 0) -> list[int]:
        self._turn += 1
        return [GAMMA * (self._turn % 2)] * len(rows)


def test_turn_that_are_not_drafted_are_followed() -> None:
    engine = Engine(target("gemma4"), drafter("gemma4", "chain"), pacer=Seldom(4, 0.1))
    outputs = assert_equals_generate(engine, "gemma4", "image")
    assert all(output.stats.drafted_tokens > 0 for output in outputs)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"backbone_hidden_size": 32}, "its hidden size is 32 but this target's is 64"),
        ({"vocab_size": 96}, "its vocabulary is 96 but this target's is 192"),
        ({"global_head_dim": 16}, r"layers of type full_attention is \(2, 16\) but this target's is \(2, 32\)"),
        ({"num_key_value_heads": 1}, r"layers of type sliding_attention is \(1, 16\) but this target's is \(2, 16\)"),
        ({"sliding_window": 8}, "its sliding window is 8 but this target's is 12"),
    ],
)
def test_an_assistant_of_another_target_is_refused(changes: dict[str, Any], says: str) -> None:
    other = adapt(assistant_model("gemma4", **changes), drafts=True)
    with pytest.raises(ModelError, match=says):
        AssistantDrafter(other, target("gemma4"), Chain(2))


def test_an_assistant_is_no_target() -> None:
    with pytest.raises(ModelError, match="which drafts for another model and cannot answer alone"):
        adapt(assistant_model("gemma4"))


@pytest.mark.parametrize("option", ["as_it_is", "top_p"])
@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_rows_sampled_with_an_assistant_follow_the_target(tree: str, option: str) -> None:
    owner = Target(small_target())
    assert_follows(Engine(owner, AssistantDrafter(small_assistant(), owner, TREES[tree])), option, ROWS // 8)


def test_a_row_that_samples_forgets_what_earlier_turns_taught(monkeypatch: pytest.MonkeyPatch) -> None:
    session, restarted = drafter("gemma4", Chain(GAMMA)).open(1, Context(target("gemma4"), 1)), list[int]()
    monkeypatch.setattr(type(session._shaping), "restart", lambda _, row: restarted.append(row))
    session.restart(0)
    assert restarted == [0]
