"""Greedy decoding gives the tokens of Hugging Face `generate`, whatever is drafted and however rows are batched."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
from sampling_kit import PROMPT, small_model

from families import FAMILIES, MAX_NEW_TOKENS, STOCK, VISUAL_FAMILIES
from harness import (
    FIRST,
    METHODS,
    POLICIES,
    answer,
    assert_equals_generate,
    assert_one_shot,
    assert_partly_accepted,
    draft,
    engine,
    prompt,
    requests,
    run,
    second_turn,
    target,
    tokens,
)
from saccade.draft.lookup import PromptLookup
from saccade.draft.merged import MergedDrafter
from saccade.draft.model import ModelDrafter
from saccade.draft.suffix import SuffixDrafter
from saccade.draft.trees.policy import Chain
from saccade.draft.trees.sage import SageSession, SageTree
from saccade.engine import Engine, Request
from saccade.engine.costs import Drafts, Pacer, Trials
from saccade.inputs.families.family import Prompt
from saccade.options import SuffixOptions
from saccade.target_model.adapter import Target

pytestmark = pytest.mark.executors

# Every family's first kind (an image, or text) for one row and for three; of the other kinds one row is slow.
CASES = [
    pytest.param(name, kind, rows, marks=[pytest.mark.slow] if rows == 1 and kind != case.kinds[0] else [])
    for name, case in FAMILIES.items()
    for kind in case.kinds
    for rows in (1, 3)
]


@pytest.mark.singly
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "kind", "rows"), CASES)
def test_tokens_equal_generate(name: str, kind: str, method: str, rows: int) -> None:
    outputs = assert_equals_generate(engine(name, method), name, kind, rows)
    if method != "plain":
        assert_partly_accepted(outputs)


class Whims(Drafts):
    """Drafts that end, and are cut row by row, whatever the drafter's confidence is."""

    chance = random.Random(1)

    def add(self, confidences: Sequence[float]) -> bool:
        super().add(confidences)
        self.lengths = self.chance.choices(range(5), k=len(self.rows))
        return bool(self.rates) and self.chance.random() < 0.7


class Wilful(Pacer):
    """Drafts as it likes, row by row and step by step, and joins some rows late."""

    def __init__(self) -> None:
        super().__init__(4, 0.1)
        self._chance = random.Random(0)

    @property
    def is_proven(self) -> bool:
        return True

    def admits(self, others: int, prompt: int, remaining: float) -> bool:
        return self._chance.random() < 0.5

    def lengths(self, rows: Sequence[Trials], others: int = 0) -> list[int]:
        return self._chance.choices((0, 0, 1, 2, 4), k=len(rows))

    def begin(self, rows: Sequence[Trials], others: int, levels: int | None = None) -> Drafts:
        drafts = super().begin(rows, others, levels)
        return Whims(*(getattr(drafts, field.name) for field in fields(Drafts)))


@pytest.mark.some_families
@pytest.mark.parametrize(("name", "kind", "rows"), CASES)
def test_a_paced_chain_equals_generate_whichever_steps_are_drafted(name: str, kind: str, rows: int) -> None:
    paced = Engine(target(name), ModelDrafter(draft(name), POLICIES["chain"]), pacer=Wilful())
    outputs = assert_equals_generate(paced, name, kind, rows)
    assert sum(output.stats.drafted_tokens for output in outputs) > 0


@pytest.mark.some_families
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_prompt_lookup_equals_generate(name: str, rows: int) -> None:
    outputs = assert_equals_generate(engine(name, "lookup"), name, None, rows, 32)  # shorter answers may repeat nothing
    assert sum(output.stats.drafted_tokens for output in outputs) > 0


@pytest.mark.some_families
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_suffix_decoding_equals_generate_and_knows_an_answer_that_it_gave(name: str, rows: int) -> None:
    method = Engine(target(name), SuffixDrafter(SuffixOptions(min_token_prob=0.01)))
    first, again = (assert_equals_generate(method, name, None, rows, 32) for _ in range(2))
    passes = [sum(output.stats.target_passes for output in outputs) for outputs in (first, again)]
    assert passes[1] < passes[0] / 2


@pytest.mark.some_families
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", VISUAL_FAMILIES)
def test_a_drafter_that_cannot_see_changes_nothing(name: str, policy: str) -> None:
    """The drafter gets a text prompt of another length, so its positions differ from the target's."""
    blind = ModelDrafter(Target(FAMILIES[name].text_draft_model()), POLICIES[policy])
    rows = [r.prompt for r in requests(name, "image")]
    asked = [Request(row, draft_prompt=Prompt(row.ids[:3] + row.ids[-4:])) for row in rows]
    outputs = Engine(target(name), blind).generate(asked, max_new_tokens=24)
    assert tokens(outputs) == FAMILIES[name].reference("image", rows=3, n=24)


@pytest.mark.some_families
@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_target_as_its_own_drafter_is_always_right(name: str) -> None:
    """Draft and target take different paths through cache and masks; both must be exact for every draft to stand."""
    own = Engine(target(name), ModelDrafter(Target(FAMILIES[name].model()), POLICIES["chain"]))
    (output,) = assert_equals_generate(own, name, None, 1, 20)
    assert output.stats.prefill_tokens == 5  # the pass that ends the prompt verifies the first 4 drafts, too
    assert output.stats.target_passes == 3  # 4 drafts and a bonus per pass
    assert output.stats.accepted_tokens == 16


@pytest.mark.some_families
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [n for n in VISUAL_FAMILIES if n != "llava_onevision"])
def test_rows_with_and_without_images_share_a_batch(name: str, policy: str) -> None:
    """Every row has its own length, its own media and its own rope delta."""
    case = FAMILIES[name]
    kinds = ["text", "image", "images2", *(["video"] if case.video else [])]
    asked = [Request(prompt(name, kind)) for kind in kinds]
    outputs = engine(name, policy).generate(asked, max_new_tokens=MAX_NEW_TOKENS)
    assert tokens(outputs) == [case.reference(kind)[0] for kind in kinds]


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl", "gemma3"])
def test_rows_that_end_early_leave_the_others_alone(name: str) -> None:
    case = FAMILIES[name]
    kind = case.kinds[0]
    expected = case.reference(kind, rows=3)
    eos = expected[1][9]
    ends = [row[: row.index(eos) + 1] if eos in row else row for row in expected]
    for policy in POLICIES:
        outputs = run(name, policy, case.inputs(kind, rows=3), eos_token_id=eos)
        assert tokens(outputs) == ends
        assert outputs[1].finish_reason == "eos"


@pytest.mark.some_families
@pytest.mark.parametrize(
    "name", [n for n in FAMILIES if "moe" not in n and n not in ("gemma3", *STOCK) and "ministral3" not in n]
)
def test_the_stock_modules_equal_generate_too(name: str) -> None:
    """Everywhere else in this suite a lean decoder runs these families' tree forwards."""
    case = FAMILIES[name]
    assert target(name).is_lean
    stock = Target(case.model(), executor="stock")
    assert not stock.is_lean
    drafter = ModelDrafter(Target(case.draft_model(), executor="stock"), POLICIES["static"])
    outputs = assert_equals_generate(Engine(stock, drafter), name)
    assert_partly_accepted(outputs)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_stale_rope_delta_on_the_module_does_no_harm(name: str) -> None:
    case = FAMILIES[name]
    model = case.model()
    shared = Engine(Target(model), ModelDrafter(draft(name), POLICIES["chain"]))
    for kind in ("images2", "text", "video", "image"):
        model.generate(**case.row_inputs("images2", row=1), max_new_tokens=2)
        assert model.base_model.rope_deltas.abs().sum() > 0
        assert answer(shared, prompt(name, kind)).tokens == case.reference(kind)[0]


# --------------------------------------------------------------------------- SAGE

SWITCHES: dict[str, SageTree] = {
    "as published": SageTree(),
    "own probabilities": SageTree(probability="own", threshold=0.2),
    "same step": SageTree(lookahead=False),
    "top probability": SageTree(signal="top"),
    "last accepted node": SageTree(alpha_of="accepted"),
    "no history": SageTree(window=0),
    "few nodes": SageTree(total=6),
}


@cache
def sage(name: str, switch: str = "as published") -> Engine:
    return Engine(target(name), ModelDrafter(draft(name), SWITCHES[switch]))


@pytest.mark.some_families
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_trees_of_sage_equal_generate(name: str, rows: int) -> None:
    outputs = assert_equals_generate(sage(name), name, None, rows)
    assert_partly_accepted(outputs)


@pytest.mark.parametrize("switch", list(SWITCHES)[1:])
@pytest.mark.parametrize("name", ["llama", "qwen3_vl", "gemma3"])
def test_every_switch_of_sage_leaves_the_tokens_alone(name: str, switch: str) -> None:
    outputs = assert_equals_generate(sage(name, switch), name)
    assert_partly_accepted(outputs)


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl"])
def test_sizes_of_sage_bounded_for_accelerators_leave_the_tokens_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the host does not read how many nodes there are; padding takes their place."""
    begin = SageSession.begin

    def begun(*arguments: Any) -> Any:
        growth: Any = begin(*arguments)
        growth._exact = False
        return growth

    monkeypatch.setattr(SageSession, "begin", begun)
    outputs = assert_equals_generate(sage(name), name)
    monkeypatch.undo()
    exact_sizes = sage(name).generate(requests(name), max_new_tokens=24)
    assert [o.stats.drafted_tokens for o in outputs] == [o.stats.drafted_tokens for o in exact_sizes]


# --------------------------------------------------------------------------- a draft model's tree and prompt lookup


def merged(policy: str, total: int = 64) -> Engine:
    drafter = ModelDrafter(draft("llava"), POLICIES[policy])
    return Engine(target("llava"), MergedDrafter(drafter, PromptLookup(6), total))


@pytest.mark.parametrize("total", [1, 5])
def test_a_node_cap_of_a_merged_tree_changes_no_token(total: int) -> None:
    outputs = assert_equals_generate(merged("static", total), "llava")
    for stats in (output.stats for output in outputs):
        assert stats.drafted_tokens <= total * (stats.target_passes + 1), "the pass that ends the prompt, too"


def test_a_second_turn_with_merged_trees_goes_on() -> None:
    session = merged("chain").open(1)
    answer(session.engine, prompt("llava"), FIRST, session=session)
    output = assert_one_shot(session, "llava", second_turn("llava", "image"))
    assert output.stats.reused_tokens > 0


def test_an_answer_that_repeats_the_prompt_is_copied_where_the_draft_model_is_lost() -> None:
    """The draft model knows nothing of the target; what was said before is all that helps."""
    stranger = ModelDrafter(Target(small_model(7)), Chain(3))
    own = Target(small_model(1))
    first = answer(Engine(own), Prompt(tuple(PROMPT)), 26)
    again = Prompt((*PROMPT, *first.tokens))
    both = MergedDrafter(stranger, PromptLookup(8))
    outputs = [answer(Engine(own, drafter), again, 26) for drafter in (stranger, both)]
    assert outputs[0].tokens == outputs[1].tokens
    assert outputs[1].stats.target_passes < outputs[0].stats.target_passes
