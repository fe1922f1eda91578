"""A head's draft as one graph gives the trees of ordinary operations, on graphs that repeat these on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from families import FAMILIES
from heads_kit import POLICIES, prompts, random_head, trained_head
from recorded_graphs import record
from saccade.draft import captured
from saccade.draft.captured import CapturedDraft, DraftGraphs
from saccade.draft.drafter import Begun, DraftSession, rests
from saccade.draft.heads.head import Head
from saccade.draft.heads.session import HeadDrafter, HeadDraftSession, HeadEntries
from saccade.draft.trees import policy
from saccade.draft.trees.dynamic import WidthTree
from saccade.draft.trees.policy import ConfidentChain
from saccade.engine import Engine, Request
from saccade.engine.row import plan
from saccade.engine.step import StepRunner
from saccade.errors import SaccadeWarning
from saccade.target_model import graphs
from saccade.target_model.adapter import Target

POLICIES = {**POLICIES, "width": WidthTree(width=2, max_depth=3), "confident": ConfidentChain(gamma=3)}


@pytest.fixture(autouse=True)
def _graphs_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(graphs.SWITCH, "graphs")
    monkeypatch.setattr(policy, "likeliest", lambda logits: logits.argmax(-1))  # which a CPU computes otherwise


@pytest.fixture
def _captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(graphs.CAPTURES, "cpu", record)


def engine(family: str, head: Head, policy: str = "dynamic") -> Engine:
    target = Target(FAMILIES[family].model())
    return Engine(target, HeadDrafter(head, target, POLICIES[policy], in_training=True))


def parts(tree: Any) -> list[Any]:
    return [getattr(tree, name).tolist() for name in ("tokens", "parents", "depth", "ancestors", "valid")]


def drafted(
    monkeypatch: pytest.MonkeyPatch, under_test: Engine, family: str = "llava", count: int = 7, **options: Any
) -> list[Any]:
    """All drafted trees, and the answers to some prompts, which join two rows as others leave them."""
    case, seen = FAMILIES[family], list[Any]()
    propose = HeadDraftSession.propose

    def noted(self: Any, *arguments: Any) -> Any:
        tree = propose(self, *arguments)
        seen.append(parts(tree))
        return tree

    batch, running = under_test.open(2, longest_step=math.inf), []
    for number in range(count):
        (prompt,) = prompts(case, case.row_inputs("image", number % 3))
        (decoding,) = plan(under_test.target, [prompt], max_new_tokens=9 + 2 * number, **options)
        running.append(batch.add(Request(prompt, seed=number), decoding))
    with monkeypatch.context() as patched:
        patched.setattr(HeadDraftSession, "propose", noted)
        while not batch.is_idle:
            batch.step()
    assert [row.error for row in running] == [None] * count
    return [seen, [row.output for row in running]]


def answers(under_test: Engine, **options: Any) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patched:
        return drafted(patched, under_test, count=3, **options)[1]


def graphs_of(under_test: Engine) -> DraftGraphs:
    """Graphs of the caches that the last session gave back."""
    assert isinstance(under_test.drafter, HeadDrafter)
    (cache, *_) = under_test.drafter.spare
    assert isinstance(cache.graphs, DraftGraphs)
    return cache.graphs


@pytest.mark.parametrize(
    ("family", "kind", "tree", "options"),
    [
        ("llava", "eagle2", "static", {}),
        ("qwen2_5_vl", "eagle2", "chain", {}),
        ("llava", "eagle2", "width", {}),
        ("qwen2_5_vl", "eagle3", "dynamic", {}),
        ("qwen3_vl", "eagle3", "dynamic", {"own_vocabulary": 60}),
        ("llava", "hivis", "dynamic", {}),
        ("qwen2_5_vl", "msd", "dynamic", {}),
        ("llava", "dream", "dynamic", {}),
        ("qwen2_5_vl", "dream", "chain", {"cross": 2}),
    ],
)
def test_captured_drafts_are_those_of_ordinary_operations(
    monkeypatch: pytest.MonkeyPatch, family: str, kind: str, tree: str, options: dict[str, Any]
) -> None:
    head = random_head(family, kind, **options)
    expected = drafted(monkeypatch, engine(family, head, tree), family, 3)
    monkeypatch.setitem(graphs.CAPTURES, "cpu", record)
    under_test = engine(family, head, tree)
    assert drafted(monkeypatch, under_test, family, 3) == expected
    used = graphs_of(under_test)
    assert used.pool.enabled
    assert used.replays


@pytest.fixture
def right() -> tuple[Head, list[Any]]:
    """A head that is often right, so that rows emit unequal numbers of tokens, and what it drafts without graphs."""
    head = trained_head("llava", "eagle2")
    with pytest.MonkeyPatch.context() as patched:
        expected = drafted(patched, engine("llava", head))
    return head, expected


@pytest.mark.usefixtures("_captures")
@pytest.mark.parametrize("change", ["forget", "move", None])
def test_a_draft_that_was_begun_serves_its_row_no_more_once_that_has_other_content_or_other_places(
    change: str | None,
) -> None:
    under_test = engine("llava", random_head("llava", "eagle3"))
    batch, session = under_test.open(2, longest_step=math.inf), None
    for number in range(2):
        (prompt,) = prompts(FAMILIES["llava"], FAMILIES["llava"].row_inputs("image", number))
        (decoding,) = plan(under_test.target, [prompt], max_new_tokens=40)
        batch.add(Request(prompt), decoding)
    while session is None or session._next.made is None:
        batch.step()
        session = batch.drafting
    assert isinstance(session, HeadDraftSession)
    both, cache = rests(session.entries.caches, [0, 1], session._limit), session.entries.cache
    assert session._next.places(both) == []
    assert session._next.places({1: both[1], 0: both[0]}) == [1, 0]
    if change == "forget":
        session.forget(0)
    elif change == "move":
        cache.reserve(0, cache.capacity(0) + 2 * cache.slots)
        both = rests(session.entries.caches, [0, 1], session._limit)
    served = [session._next.places({row: both[row]}) for row in (0, 1)]
    assert (None in served) == (change is not None)


@pytest.mark.usefixtures("_captures")
@pytest.mark.parametrize(("kind", "tree"), [("eagle3", "dynamic"), ("hivis", "static"), ("dream", "chain")])
def test_drafts_that_begin_before_the_host_knows_the_verdict_are_the_usual_ones(
    monkeypatch: pytest.MonkeyPatch, kind: str, tree: str
) -> None:
    """Beside rows that leave, come into used slots, and have steps without drafts."""
    head, served = random_head("llava", kind), list[Any]()
    lengths, places = StepRunner._draft_lengths, Begun.places

    def paused(self: Any, rows: Any, *rest: Any) -> dict[int, int]:
        usual = lengths(self, rows, *rest)
        return usual if sum(len(row.output) for row in rows) % 11 else dict.fromkeys(usual, 0)

    def noted(self: Begun, rest: Any) -> list[int] | None:
        served.append(places(self, rest))
        return served[-1]

    monkeypatch.setattr(StepRunner, "_draft_lengths", paused)
    with monkeypatch.context() as never:
        never.setattr(HeadDraftSession, "begin_next", DraftSession.begin_next)
        expected = drafted(monkeypatch, engine("llava", head, tree))
    monkeypatch.setattr(Begun, "places", noted)
    assert drafted(monkeypatch, engine("llava", head, tree)) == expected
    assert sum(found is not None for found in served) > 4


def test_rows_that_emit_unequal_numbers_of_tokens_join_and_leave_and_the_next_batch_finds_the_graphs(
    monkeypatch: pytest.MonkeyPatch, right: tuple[Head, list[Any]]
) -> None:
    head, expected = right
    monkeypatch.setitem(graphs.CAPTURES, "cpu", record)
    under_test, counts = engine("llava", head), set[tuple[int, ...]]()
    commit = HeadEntries.commit

    def noted(self: HeadEntries, rows: Any, emitted: Any) -> None:
        counts.add(tuple(emitted))
        commit(self, rows, emitted)

    monkeypatch.setattr(HeadEntries, "commit", noted)
    assert drafted(monkeypatch, under_test) == expected
    first = graphs_of(under_test)
    replays = first.replays
    assert drafted(monkeypatch, under_test) == expected
    assert graphs_of(under_test) is first
    assert first.pool.enabled
    assert first.replays - replays > replays > 0
    assert any(len(set(each)) > 1 for each in counts)


def _late_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    place = CapturedDraft.place

    def moved(self: Any, caches: Any, count: int, mask: Any, gap: int | None, *rest: Any) -> Any:
        return place(self, caches, count, mask, None if gap is None else gap + 1, *rest)

    monkeypatch.setattr(CapturedDraft, "place", moved)


def _all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out = captured.lay_out

    def seen(*arguments: Any) -> None:
        *others, mask = arguments
        lay_out(*others, None if mask is None else torch.ones_like(mask))

    monkeypatch.setattr(captured, "lay_out", seen)


def _other_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    fix = HeadDraftSession._fix

    def moved(self: Any, *arguments: Any) -> Any:
        drafted = fix(self, *arguments)
        drafted.tree.tokens.add_(1)
        return drafted

    monkeypatch.setattr(HeadDraftSession, "_fix", moved)


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (_late_levels, "gave other logits"),
        (_all_visible, "gave other logits"),
        (_other_trees, "gave other logits"),
    ],
)
def test_a_captured_draft_that_differs_from_ordinary_operations_is_noticed_at_once(
    monkeypatch: pytest.MonkeyPatch, right: tuple[Head, list[Any]], plant: Any, reason: str
) -> None:
    head, expected = right
    monkeypatch.setitem(graphs.CAPTURES, "cpu", record)
    plant(monkeypatch)
    with pytest.warns(SaccadeWarning, match=reason):
        assert drafted(monkeypatch, engine("llava", head)) == expected


@pytest.mark.usefixtures("_captures")
def test_drafts_whose_form_or_tokens_the_host_decides_are_not_captured() -> None:
    head = random_head("llava", "eagle2")
    for tree in ("confident", "sage"):
        under_test = engine("llava", head, tree)
        answers(under_test)
        assert not under_test.drafter.spare
    under_test = engine("llava", head, "chain")
    answers(under_test, do_sample=True, temperature=0.7)
    (cache,) = under_test.drafter.spare
    assert cache.graphs is None


@pytest.mark.usefixtures("_captures")
def test_graphs_of_a_head_are_dropped_when_its_weights_move_and_wait_while_it_has_hooks() -> None:
    head = random_head("llava", "eagle2")
    under_test, seen = engine("llava", head), list[int]()
    answers(under_test)
    used = graphs_of(under_test)
    assert used.replays
    before = list(used._steps.values())
    head.fc.weight.data = head.fc.weight.data.clone()
    answers(under_test)
    assert used._steps
    assert not set(map(id, before)) & set(map(id, used._steps.values()))
    replays = used.replays
    handle = head.embedding_norm.register_forward_hook(lambda *_: seen.append(1))
    answers(under_test)
    handle.remove()
    assert seen
    assert used.replays == replays


@pytest.mark.usefixtures("_captures")
def test_free_memory_leaves_room_for_the_logits_of_captured_drafts() -> None:
    target = Target(FAMILIES["llava"].model())
    before = target.executor.reserved
    for _ in range(2):
        HeadDrafter(random_head("llava", "eagle2"), target, POLICIES["dynamic"])
        assert target.executor.reserved - before == 256 * target.vocab_size * 12
