"""What a head computes in a tree, with cache and batch, is what every path gives as a sequence of its own.

Answers are the target's whatever a head guesses, and a conversation continues from its cache. One file for all kinds:
those whose entries get the target's state at one token, DREAM with its second cache, Kangaroo on the target's first
layers, and Medusa's and Hydra's stacks without a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from families import FAMILIES, Inputs, pristine, reference_greedy
from heads_kit import (
    AHEAD,
    DRAFTING,
    EVERY,
    POLICIES,
    Recording,
    dropped_of,
    engine,
    entries_of,
    kind_of_prompt,
    prompts,
    random_head,
    recorded,
    trained_head,
    worst_difference,
)
from saccade.draft.heads import kangaroo, medusa, vispec
from saccade.draft.heads import session as under_test
from saccade.draft.heads.dream import Dream, MemoryEntries
from saccade.draft.heads.head import Head, Placement
from saccade.draft.heads.kangaroo import Kangaroo
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.draft.heads.session import HeadDraftSession, HeadEntries
from saccade.draft.trees.policy import ConfidentChain
from saccade.engine import Request
from saccade.engine.row import plan
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.target_model.token_blocks import ForwardOutput

NAMES = ("llama", "llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm")
FIRST, SECOND = 11, 7


def close(head: Head) -> float:
    """Standard deviations of the logits: hundreds of roundings of float32. Planted mistakes move them by `far`."""
    return 1e-4 if head.kind == "dream" else 1e-3


def far(head: Head) -> float:
    """0.1 and more, but 0.004 in DREAM's states out of order: attention has no positions there."""
    return 1e-3 if head.kind == "dream" else 0.05


def difference(
    name: str, head: Head, policy: Any = "dynamic", rows: int = 3, kind: str = "", n: int = 9, least: int = 0
) -> float:
    """Of an answer of n tokens, the target's own, of which at least ``least`` of every row were drafted."""
    case, kind = FAMILIES[name], kind or kind_of_prompt(name)
    inputs = [case.row_inputs(kind, row) for row in range(rows)]
    requests = [prompts(case, one)[0] for one in inputs]
    outputs, steps = recorded(name, head, POLICIES.get(policy, policy), requests, n)
    assert [o.tokens for o in outputs] == case.reference(kind, rows=rows, n=n)
    assert min(output.stats.accepted_tokens for output in outputs) >= least
    return worst_difference(name, head, inputs, outputs, steps)


@pytest.mark.singly
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("name", NAMES)
def test_trees_of_ragged_rows(name: str, kind: str) -> None:
    head = trained_head(name, kind)
    least = 1 if kind in AHEAD else 3
    assert difference(name, head, rows=2, n=6 if kind == "kangaroo" else 10, least=least) < close(head)


SHALLOW = [(kind, policy) for kind in AHEAD for policy in ("chain", "static")]
DEEP = [(kind, policy) for kind in (*DRAFTING, "dream") for policy in ("chain", "static", "sage")]


@pytest.mark.singly
@pytest.mark.parametrize(("kind", "policy"), [*DEEP, *SHALLOW, ("kangaroo", ConfidentChain(5, 0.6))])
def test_every_policy(kind: str, policy: Any) -> None:
    head = trained_head("llava", kind)
    assert difference("llava", head, policy, rows=2, n=5) < close(head)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *(("hivis", {"after_image": after}) for after in ("text", "visual")),
    *(("eagle2", {"text_only": True, "after_image": after}) for after in ("text", "visual")),
    ("eagle2", {"text_only": True, "features": "none"}),
    ("peagle", {"text_only": True}),
    ("eagle2", {"blocks": 3}),
    ("dream", {"keep": 1.0}),
    ("dream", {"keep": 0.5}),
    ("dream", {"keep": 0.25, "cross": 2}),
    ("dream", {"gate": "replace"}),
    ("dream", {"initial": False}),
    ("dream", {"final": False}),
    ("dream", {"cross": 0}),  # the direct path alone
    ("dream", {"cross": 0, "direct": False}),
    ("dream", {"gate": "replace", "direct": False}),
    ("hivis", {"norms": "all"}),
    ("eagle2", {"norms": "none"}),
]


@pytest.mark.singly
@pytest.mark.parametrize("prompt_kind", ["image", "images2", "video", "text"])
@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=str)
def test_options_with_several_images_videos_and_words_alone(
    kind: str, options: dict[str, Any], prompt_kind: str
) -> None:
    head = random_head("qwen2_5_vl", kind, **options)
    assert difference("qwen2_5_vl", head, rows=2, kind=prompt_kind, n=5) < close(head)


@pytest.mark.parametrize("kind", [*DRAFTING, "dream"])
def test_a_prompt_read_in_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "CHUNK", 3)
    head = random_head("smolvlm", kind)
    assert difference("smolvlm", head, n=5) < close(head)


# --------------------------------------------------------------------------- turns


def difference_in_second_turn(name: str, head: Head, kind: str, follow_up: str, rows: int = 2) -> float:
    """Rows end their first answers inside accepted paths, so that tokens are left which the head has not run."""
    case, recording = FAMILIES[name], Recording(POLICIES["dynamic"])
    first: list[Inputs] = [case.row_inputs(kind, row) for row in range(rows)]
    session = engine(name, head, recording).open(rows)
    answers, _ = recorded(name, head, recording, [prompts(case, one)[0] for one in first], FIRST, session)
    second = [case.continued(kind, row, answer.tokens, follow_up=follow_up) for row, answer in enumerate(answers)]
    outputs, steps = recorded(name, head, recording, [prompts(case, one)[0] for one in second], SECOND, session)
    dropped = []
    for output, one, before in zip(outputs, second, first, strict=True):
        assert output.tokens == reference_greedy(pristine(name), one, SECOND)[0]
        start = output.stats.reused_tokens
        assert start == before["input_ids"].shape[1] + FIRST - 1
        dropped.append(dropped_of(name, before, head) | dropped_of(name, one, head, start))
    return worst_difference(name, head, second, outputs, steps, dropped)


@pytest.mark.some_families
@pytest.mark.singly
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("name", NAMES)
def test_ragged_rows_go_on_with_another_image(name: str, kind: str) -> None:
    head, prompt_kind = trained_head(name, kind), kind_of_prompt(name)
    assert difference_in_second_turn(name, head, prompt_kind, prompt_kind) < close(head)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("hivis", {"after_image": "text"}), ("hivis", {"after_image": "visual"}), ("dream", {"keep": 0.5})],
)
def test_words_after_an_image_and_an_image_after_words(kind: str, options: dict[str, Any]) -> None:
    head = random_head("llava", kind, **options)
    assert difference_in_second_turn("llava", head, "image", "text") < close(head)
    assert difference_in_second_turn("llava", head, "text", "image") < close(head)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("hivis", "dream", "kangaroo", "hydra") else [pytest.mark.slow])
        for kind in EVERY
    ],
)
def test_other_prompts_in_the_same_session(kind: str) -> None:
    """The same question again, another image under the same words, a shared beginning, words alone, and back."""
    name, head = "llava", trained_head("llava", kind)
    case, recording = FAMILIES[name], Recording(POLICIES["dynamic"])
    image = case.row_inputs("image", 0)
    other = {**image, "pixel_values": image["pixel_values"].flip(0).neg()}
    longer = case.continued("image", 0, case.reference("image")[0][:5])
    every = [image, image, other, *([] if kind == "dream" else [longer]), case.row_inputs("text", 1), image]
    session = engine(name, head, recording).open(1)
    for inputs in every:
        outputs, steps = recorded(name, head, recording, [prompts(case, inputs)[0]], SECOND, session)
        assert outputs[0].tokens == reference_greedy(pristine(name), inputs, SECOND)[0]
        # Where the image is reused, it also stays as it was read.
        is_reused = outputs[0].stats.reused_tokens > inputs["input_ids"].shape[1] // 2
        dropped = dropped_of(name, image if is_reused else inputs, head)
        assert worst_difference(name, head, [inputs], outputs, steps, [dropped]) < close(head)


def test_an_answer_that_was_broken_off() -> None:
    name, head = "llava", trained_head("llava", "hivis")
    case, recording = FAMILIES[name], Recording(POLICIES["dynamic"])
    inputs = case.row_inputs("image", 0)
    (prompt,) = prompts(case, inputs)
    under = engine(name, head, recording)
    session = under.open(1)
    run = under.start([Request(prompt)], plan(under.target, [prompt], max_new_tokens=20), session)
    answer: list[int] = []
    for step in run.steps:
        answer.extend(step.tokens[0])
        if len(answer) > 4:
            break
    run.steps.close()
    longer = case.continued("image", 0, answer)
    outputs, steps = recorded(name, head, recording, [prompts(case, longer)[0]], SECOND, session)
    assert outputs[0].stats.reused_tokens == len(prompt) + len(answer) - 1
    assert worst_difference(name, head, [longer], outputs, steps) < close(head)


def test_a_tree_policy_begins_again_with_another_prompt_and_continues_in_the_next_turn() -> None:
    name, case = "llava", FAMILIES["llava"]
    under = engine(name, trained_head(name, "hivis"), POLICIES["sage"])
    session, begun = under.open(1), []
    assert isinstance(session.drafting, HeadDraftSession)
    shaping = session.drafting._shaping
    restart = shaping.restart
    shaping.restart = lambda row: (begun.append(row), restart(row))  # type: ignore[method-assign,func-returns-value]

    def answer_to(inputs: Inputs) -> list[int]:
        (output,) = under.generate([Request(prompts(case, inputs)[0])], max_new_tokens=6, session=session)
        return output.tokens

    answer = answer_to(case.row_inputs("image", 0))
    answer_to(case.continued("image", 0, answer))
    assert begun == []
    answer_to(case.row_inputs("image", 1))
    assert begun == [0]


# --------------------------------------------------------------------------- planted mistakes

Patch = pytest.MonkeyPatch


def changed(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function by ``change``, which gets the right one and its arguments."""
    right = getattr(owner, name)
    patch.setattr(owner, name, lambda *args: change(right, *args))


def siblings_see_each_other(patch: Patch) -> None:
    def blurred(right: Any, self: Any, cache: Any, rows: Any, count: int, mask: Tensor | None, *more: Any) -> None:
        if self.memory in (None, cache):  # DREAM's: as released, in the cross-attention
            mask = None if mask is None else torch.ones_like(mask)
        right(self, cache, rows, count, mask, *more)

    changed(patch, HeadEntries, "lay", blurred)


def prompt_features_one_late(patch: Patch) -> None:
    changed(
        patch,
        under_test,
        "read_at",
        lambda right, states, sources: right(states, torch.where(sources < 0, sources, sources + 1)),
    )


def answer_features_one_late(patch: Patch) -> None:
    def late(right: Any, self: Any, rows: Any, tree: Any, scores: Any, verdict: Any, *more: Any) -> None:
        right(self, rows, tree, scores, replace(verdict, path=verdict.path.roll(-1, 1)), *more)

    changed(patch, HeadDraftSession, "observe", late)


def nodes_have_the_root_s_state(patch: Patch) -> None:
    changed(
        patch,
        HeadEntries,
        "run_level",
        lambda right, self, rows, frontier, ran: right(
            self, rows, frontier, [ran[0].expand_as(level) for level in ran]
        ),
    )


def positions_by_node(patch: Patch) -> None:
    def counted(right: Any, self: Any, rows: Any, count: int, gap: int | None) -> Placement:
        at = right(self, rows, count, gap)
        places = at.positions + torch.arange(count) * (gap is not None)
        return replace(at, positions=places, last=at.last + count)

    changed(patch, HeadEntries, "placed", counted)


def guesses_stay_in_the_cache(patch: Patch) -> None:
    def kept(self: Any, rows: Any) -> None:
        self.commit(rows, [range(min(self.pending[row], 1)) for row in rows])

    patch.setattr(under_test.RowCache, "drop", kept)


def another_step(patch: Patch) -> None:
    """The residual of HiViS that belongs to another step."""
    changed(patch, HeadEntries, "run", lambda right, *args: right(*args[:-1], args[-1] + 1))


def features_of_visual_tokens(patch: Patch) -> None:
    patch.setattr(type(trained_head("llava", "msd")), "entries", Head.entries)


def image_of_another_row(patch: Patch) -> None:
    def swapped(right: Any, self: Any, rows: Any, tokens: Tensor) -> Tensor:
        self._global = self._global.roll(1, 0)
        return right(self, rows, tokens)

    changed(patch, vispec.ViSpecEntries, "inputs", swapped)


def own_feature_is_seen(patch: Patch) -> None:
    def late(right: Any, self: Any, row: int, *args: Any) -> None:
        kept = self.features.at[row].clone()
        self.features.at[row][:-1] = kept[1:]
        right(self, row, *args)
        self.features.at[row] = kept

    changed(patch, MemoryEntries, "read", late)


def positions_without_gaps(patch: Patch) -> None:
    def closed(right: Any, self: Any, embeddings: Tensor, at: Placement) -> Tensor:
        held = at.positions - at.positions[:, :1]
        return right(self, embeddings, replace(at, positions=torch.arange(held.shape[1])[None] + 0 * held))

    changed(patch, Dream, "begin", closed)


def guesses_stay_in_the_memory(patch: Patch) -> None:
    def stay(right: Any, self: Any, rows: Any, *args: Any) -> Any:
        tree = right(self, rows, *args)
        self.entries.memory.commit(rows, [range(1)] * len(rows))
        return tree

    changed(patch, HeadDraftSession, "propose", stay)


def dropped_features_are_blind(patch: Patch) -> None:
    """Without an entry, a visual token is still attended to."""

    def blind(right: Any, self: Any, row: int, *args: Any) -> None:
        self.features.at[row][self._dropped[row]] = 0
        right(self, row, *args)

    changed(patch, MemoryEntries, "read", blind)


def states_of_the_token_before(patch: Patch) -> None:
    patch.setattr(Kangaroo, "lag", 1)


def guesses_that_do_not_see_the_root(patch: Patch) -> None:
    patch.setattr(kangaroo, "pad", lambda x, by, value: F.pad(x, by, value=False))


def all_guesses_at_the_root_s_position(patch: Patch) -> None:
    def flat(right: Any, self: Any, cache: Any, block: Any, layer: int) -> Any:
        return right(self, cache, replace(block, depth=block.depth * 0), layer)

    changed(patch, Target, "early_exit", flat)


def state_of_the_root(patch: Patch) -> None:
    def before(right: Any, self: Any, *args: Any) -> None:
        *others, output, drafted = args
        hidden = {layer: states.roll(1, 1) for layer, states in output.hidden.items()}
        right(self, *others, ForwardOutput(output.logits, hidden), drafted)

    changed(patch, HeadDraftSession, "observe", before)


def path_without_its_middle(patch: Patch) -> None:
    def wrong(right: Any, frontier: Any, ran: Tensor) -> Tensor:
        paths = right(frontier, ran)
        return torch.cat([paths[..., :1], paths[..., 1:].flip(-1)], -1)

    changed(patch, medusa, "paths_to", wrong)


COMMON = (
    *(siblings_see_each_other, prompt_features_one_late, answer_features_one_late),
    *(nodes_have_the_root_s_state, positions_by_node, guesses_stay_in_the_cache),
)
MISTAKES: list[tuple[str, Callable[[Patch], None]]] = [
    *(("eagle2", mistake) for mistake in COMMON),  # which all kinds share
    ("hivis", another_step),
    ("msd", features_of_visual_tokens),
    ("vispec", image_of_another_row),
    ("dream", siblings_see_each_other),
    ("dream", own_feature_is_seen),
    ("dream", positions_without_gaps),
    ("dream", answer_features_one_late),
    ("dream", guesses_stay_in_the_memory),
    ("dream", dropped_features_are_blind),
    ("kangaroo", states_of_the_token_before),
    ("kangaroo", guesses_that_do_not_see_the_root),
    ("kangaroo", all_guesses_at_the_root_s_position),
    ("hydra", state_of_the_root),
    ("hydra", path_without_its_middle),
]


@pytest.mark.parametrize(("kind", "mistake"), MISTAKES)
def test_a_planted_mistake_is_noticed(kind: str, mistake: Callable[[Patch], None], monkeypatch: Patch) -> None:
    name = "gemma3" if kind == "kangaroo" else "llava"
    head = random_head(name, kind) if mistake is another_step else trained_head(name, kind)
    mistake(monkeypatch)
    rows, n = (1, 5) if kind == "kangaroo" else (2, 7)
    assert difference(name, head, rows=rows, n=n) > far(head)


@pytest.mark.parametrize("kind", ["hivis", "kangaroo"])
def test_states_lost_between_turns_are_noticed(kind: str, monkeypatch: Patch) -> None:
    """The planted mistake: what was accepted last is not remembered once the row has ended."""

    def forgetful(right: Any, self: Any, row: int, *args: Any) -> Any:
        self.features.at[row][max(self.features.known[row] - 1, 0) :] = 0
        return right(self, row, *args)

    head = trained_head("llava", kind)
    changed(monkeypatch, HeadEntries, "load", forgetful)
    assert difference_in_second_turn("llava", head, "image", "image") > far(head)


# --------------------------------------------------------------------------- entries


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "smolvlm"])
def test_hidden_visual_tokens_have_no_entries(name: str, monkeypatch: Patch) -> None:
    """The first token has none either, and the first answer token has one after the first step."""
    monkeypatch.setattr("saccade.target_model.cache.QUANTUM", 1)
    case = FAMILIES[name]
    (prompt,) = prompts(case, case.row_inputs("image", 0))
    words = len(prompt) - sum(m.n_tokens for m in prompt.media)
    for head, expected in (
        (random_head(name, "hivis"), words),
        (random_head(name, "eagle2", text_only=True), words),
        (random_head(name, "eagle2"), len(prompt)),
    ):
        under = engine(name, head, Recording(POLICIES["chain"]))
        session = under.open(1)
        under.generate([Request(prompt)], max_new_tokens=1, session=session)
        assert entries_of(session).cache.lengths == [expected - 1]
        assert entries_of(session).cache.capacity(0) < len(prompt) + 20 - (len(prompt) - expected)


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "gemma3", "smolvlm"])
def test_visual_tokens_that_dream_drops_are_not_run(name: str, keep: float, monkeypatch: Patch) -> None:
    monkeypatch.setattr("saccade.target_model.cache.QUANTUM", 1)
    case, head, ran = FAMILIES[name], random_head(name, "dream", keep=keep), list[int]()
    (prompt,) = prompts(case, case.row_inputs("image", 0))
    words = len(prompt) - sum(m.n_tokens for m in prompt.media)
    kept = sum(max(1, int(keep * m.n_tokens + 0.5)) for m in prompt.media)
    assert isinstance(head, Dream)
    assert head.first is not None
    head.first.register_forward_pre_hook(lambda _, args: ran.append(args[0].shape[1]))
    under = engine(name, head, POLICIES["chain"])
    session = under.open(1)
    under.generate([Request(prompt)], max_new_tokens=2, session=session)
    own = entries_of(session)
    assert isinstance(own, MemoryEntries)
    assert (ran[0], own.cache.lengths, own.memory.lengths) == (words + kept - 1, [words + kept], [len(prompt)])
    assert own.cache.capacity(0) == own.memory.capacity(0) - (len(prompt) - words - kept)


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_a_drafter_counts_the_bytes_that_it_holds_of_a_token(kind: str) -> None:
    under = engine("llava", random_head("llava", kind), POLICIES["chain"])
    session = under.open(1)
    (prompt,) = prompts(FAMILIES["llava"], FAMILIES["llava"].row_inputs("image", 0))
    under.generate([Request(prompt)], max_new_tokens=2, session=session)
    own = entries_of(session)
    held = [cache.nbytes / cache.slots for cache in own.caches if cache.slots]
    features = own.features.at[0]
    assert own.drafter.facts.entry_bytes == sum(held) + features.nbytes / len(features)


def test_pending_entries_of_the_target_are_gone_before_it_verifies(monkeypatch: Patch) -> None:
    pending: list[int] = []

    def noting(right: Any, self: Context, blocks: Any) -> Any:
        pending.extend(self.cache.pending)
        return right(self, blocks)

    changed(monkeypatch, Context, "run", noting)
    difference("llava", trained_head("llava", "kangaroo"), "chain", rows=1)
    assert set(pending) == {0}
