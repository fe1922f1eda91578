"""Captured forwards give the tokens of ordinary ones, on graphs that repeat their operations on the CPU."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from families import FAMILIES, HYBRIDS, _language_model, _sharpen
from recorded_graphs import Freed, Overwriting, record
from saccade.draft.captured import CapturedDraft
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.model import ModelDrafter, ModelDraftSession
from saccade.draft.trees import policy
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.engine.row import plan
from saccade.engine.step import StepRunner
from saccade.errors import SaccadeWarning
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt
from saccade.methods import build
from saccade.methods.compositions import Models
from saccade.target_model import graphs
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.target_model.executor import Ahead
from saccade.target_model.graphs import GraphExecutor, StepGraphs, keys_for

TREE = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]).bool()
DEPTH = torch.tensor([[0, 1, 1]])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain": {"gamma": 3},
    "pard": {"gamma": 3},
    "auto": {},
    "dynamic-tree": {"top": 2, "max_depth": 3, "total": 6},
    "static-tree": {},
    "eagle2": {"tree": "dynamic", "top": 2, "max_depth": 2, "total": 4},
    "sage": {},
    "lvspec": {"gamma": 4},
    "lookup-merge": {"gamma": 2, "lookup_tokens": 3},
}
RECURRENT = ("qwen3_5", "nemotron_h", "lfm2")
"""A family of each kind of recurrent layer."""


@pytest.fixture(autouse=True)
def _graphs_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(graphs.SWITCH, "graphs")


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards on the CPU are captured."""
    monkeypatch.setitem(graphs.CAPTURES, "cpu", record)


def engine(family: str, method: str, **how: Any) -> Engine:
    case = FAMILIES[family]
    target = Target(case.model(), **how)
    if method == "eagle2":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            head = build_head(HeadConfig.from_target(target, "eagle2"))
        return build(method, Models(target, head=head), **OPTIONS[method])
    draft = Target(case.draft_model())
    draft.config.pard_token = 3
    return build(method, Models(target, draft, special_ids=(0, 1, 2)), **OPTIONS[method])


def prompts_of(target: Target, family: str, rows: int) -> list[Any]:
    case = FAMILIES[family]
    return split(target.config, case.inputs("image" if "image" in case.kinds else "text", rows=rows))


def tokens(under_test: Engine, family: str, rows: int = 2, new: int = 16, **options: Any) -> list[list[int]]:
    """Answers; the first row stops early, so that the others continue without it."""
    batch, running = under_test.open(rows), []
    for place, prompt in enumerate(prompts_of(under_test.target, family, rows)):
        (decoding,) = plan(under_test.target, [prompt], max_new_tokens=new // 2 if place == 0 else new, **options)
        running.append(batch.add(Request(prompt, seed=place), decoding))
    while not batch.is_idle:
        batch.step()
    assert [row.error for row in running] == [None] * rows
    return [row.output for row in running]


def caches(under_test: Engine) -> list[StepGraphs]:
    """Graphs of the caches that the last batch gave back."""
    model = getattr(under_test.drafter, "model", None)
    executors = [t.executor for t in (under_test.target, model) if isinstance(t, Target)]
    spares = [executor.spare for executor in executors if isinstance(executor, GraphExecutor)]
    return [spare.graphs for spare in spares if spare is not None]


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llava", "plain"),
        ("llava", "chain"),
        ("qwen2_vl", "chain"),
        ("llava", "pard"),
        ("qwen3_vl", "dynamic-tree"),
        ("llava", "eagle2"),
        ("qwen2_5_vl", "auto"),
        ("llava", "sage"),
        ("llava", "lvspec"),
        *(("qwen3_5", method) for method in ("eagle2", "auto")),
        *((family, "plain") for family in HYBRIDS),
        *((family, method) for family in RECURRENT for method in ("chain", "dynamic-tree")),
    ],
)
def test_captured_steps_give_the_tokens_of_ordinary_ones(
    monkeypatch: pytest.MonkeyPatch, family: str, method: str
) -> None:
    expected = tokens(engine(family, method), family, new=24)
    monkeypatch.setitem(graphs.CAPTURES, "cpu", record)
    under_test = engine(family, method)
    assert tokens(under_test, family, new=24) == expected
    used = caches(under_test)
    used += [trees for each in used for trees in each.drafts.values()]
    assert used[0].replays
    assert method in ("auto", "dynamic-tree") or all(each.replays for each in used)  # auto drafts as long as it pays
    assert used[-1].replays or method == "auto"
    assert all(each._pool.enabled for each in used)


def test_free_memory_leaves_room_for_the_graphs_of_both_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 20)
    plain = engine("llava", "chain")
    assert plain.free_memory() == 1 << 40
    monkeypatch.setitem(graphs.CAPTURES, "cpu", record)
    under_test = engine("llava", "chain")
    tokens(under_test, "llava", new=24)
    models = [under_test.target, under_test.drafter.model]
    assert under_test.free_memory() == (1 << 40) - sum(model.executor.reserved for model in models)
    alone = Engine(under_test.target, ModelDrafter(under_test.target, Chain(2)))
    assert alone.free_memory() == (1 << 40) - under_test.target.executor.reserved
    for model in models:
        held = model.executor._logits.values()
        assert 0 < sum(each.nbytes for each in held) < model.executor.reserved


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", *RECURRENT])
def test_a_drafted_chain_is_one_graph(monkeypatch: pytest.MonkeyPatch, family: str, rows: int) -> None:
    expected = drafted(monkeypatch, engine(family, "chain"), family, rows)
    monkeypatch.setitem(graphs.CAPTURES, "cpu", record)
    under_test = engine(family, "chain")
    again, ahead = drafted(monkeypatch, under_test, family, rows), []
    assert again == expected
    for shape in caches(under_test)[1]._steps:
        ahead.append(shape.ahead[0])
    assert OPTIONS["chain"]["gamma"] in ahead


def test_a_captured_chain_that_differs_from_ordinary_forwards_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The known mistake: tokens at other positions than their own."""
    expected = drafted(monkeypatch, engine("llava", "chain"), "llava", 2)
    monkeypatch.setitem(graphs.CAPTURES, "cpu", record)
    right = StepGraphs._capture_ahead

    def moved(self: StepGraphs, shape: Any, table: Tensor) -> Any:
        return right(self, shape, torch.cat([table[:, :-1], table[:, -1:] + 5], 1))

    monkeypatch.setattr(StepGraphs, "_capture_ahead", moved)
    under_test = engine("llava", "chain")
    with pytest.warns(SaccadeWarning, match="gave other logits"):
        assert drafted(monkeypatch, under_test, "llava", 2) == expected
    assert not under_test.drafter.model.executor.enabled


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("method", ["chain", "lookup-merge"])
def test_chains_that_begin_before_the_host_knows_the_verdict_are_the_usual_ones(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Beside rows that leave, come into used slots, and have steps without drafts."""
    under_test, lengths, begun = engine("llava", method), StepRunner._draft_lengths, ModelDraftSession._chains_begun
    used, steps = list[bool](), itertools.count(1)

    def checked(
        self: ModelDraftSession, made: Any, rows: list[int], tokens: list[list[int]], count: int
    ) -> Tensor | None:
        logits = begun(self, made, rows, tokens, count)
        used.append(logits is not None)
        for place, (row, new) in enumerate(zip(rows, tokens, strict=True) if logits is not None else ()):
            ids = [*self.context._contents[row].ids, *new]
            for level in logits[:, place].argmax(-1).tolist():
                assert self._drafter.model.model(torch.tensor([ids])).logits[0, -1].argmax() == level
                ids.append(level)
        return logits

    def paused(self: Any, rows: Any, *rest: Any) -> dict[int, int]:
        usual = lengths(self, rows, *rest)
        return usual if next(steps) % 10 else dict.fromkeys(usual, 0)

    monkeypatch.setattr(ModelDraftSession, "_chains_begun", checked)
    monkeypatch.setattr(StepRunner, "_draft_lengths", paused)
    batch, rows = under_test.open(2), list[Any]()
    for place, new in enumerate((5, 17, 9, 30, 12, 22, 25)):
        prompt = Prompt(tuple(range(20 + place // 2, (32, 60, 130)[place % 3])))
        (decoding,) = plan(under_test.target, [prompt], max_new_tokens=new)
        rows.append(batch.add(Request(prompt), decoding))
    while not batch.is_idle:
        batch.step()
    assert [row.error for row in rows] == [None] * len(rows)
    assert sum(used) > 4


@pytest.mark.parametrize(
    ("family", "method", "rows"),
    [("llava", "dynamic-tree", 1), ("qwen2_5_vl", "dynamic-tree", 2), ("qwen3_vl", "static-tree", 2)],
)
def test_a_tree_of_a_draft_model_is_one_graph(
    monkeypatch: pytest.MonkeyPatch, family: str, method: str, rows: int
) -> None:
    monkeypatch.setattr(policy, "likeliest", lambda logits: logits.argmax(-1))  # which a CPU computes otherwise
    expected = drafted(monkeypatch, engine(family, method), family, rows)
    monkeypatch.setitem(graphs.CAPTURES, "cpu", record)
    under_test = engine(family, method)
    assert drafted(monkeypatch, under_test, family, rows) == expected
    steps = caches(under_test)[1]
    (trees,) = steps.drafts.values()
    assert trees.replays > 1
    assert not [shape for shape in steps._steps if shape.pending is not None]  # of levels
    assert steps._pool.enabled


@pytest.mark.usefixtures("captured")
def test_a_captured_tree_of_a_draft_model_that_differs_from_ordinary_forwards_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = drafted(monkeypatch, engine("llava", "dynamic-tree"), "llava", 2)
    place = CapturedDraft.place

    def moved(self: Any, caches: Any, count: int, mask: Any, gap: int | None, *rest: Any) -> Any:
        return place(self, caches, count, mask, None if gap is None else gap + 1, *rest)

    monkeypatch.setattr(CapturedDraft, "place", moved)
    under_test = engine("llava", "dynamic-tree")
    with pytest.warns(SaccadeWarning, match="gave other logits"):
        assert drafted(monkeypatch, under_test, "llava", 2) == expected
    assert not under_test.drafter.model.executor.enabled


def drafted(monkeypatch: pytest.MonkeyPatch, under_test: Engine, family: str, rows: int) -> list[Any]:
    """Tokens of every draft, and of every answer."""
    seen: list[Any] = []
    propose = ModelDraftSession.propose

    def noted(self: Any, *arguments: Any) -> Any:
        tree = propose(self, *arguments)
        seen.extend([tree.tokens.tolist(), tree.parents.tolist()])
        return tree

    with monkeypatch.context() as patched:
        patched.setattr(ModelDraftSession, "propose", noted)
        answers = tokens(under_test, family, rows, new=32)
    return [seen, answers]


@pytest.mark.usefixtures("captured")
def test_exact_mode_keeps_its_bits_in_captured_steps() -> None:
    plain, drafted = (tokens(engine("llama", method, exact=True), "llama", new=10) for method in ("plain", "chain"))
    assert drafted == plain


def test_layers_with_and_without_window_share_a_captured_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that have passed the window run without graphs."""

    def mixed() -> Engine:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = _language_model("qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=1)(2)
            _sharpen(model)
        return Engine(Target(model.eval()))

    expected = tokens(mixed(), "qwen2")
    monkeypatch.setitem(graphs.CAPTURES, "cpu", record)
    under_test = mixed()
    assert tokens(under_test, "qwen2") == expected
    (used,) = caches(under_test)
    assert used.replays
    assert used._pool.enabled


class Steps:
    """Forwards of a context after loaded prompts, some of them by graphs."""

    def __init__(self, rows: int = 2, family: str = "qwen2_vl", sizes: tuple[int, ...] = ()) -> None:
        self.target = Target(FAMILIES[family].model())
        self.context = Context(self.target, rows)
        if sizes:
            self.context.cache.max_slots = sum(sizes)
        else:
            self.context.cache.preallocate(1024)  # more than a graph reads
        self.rows = list(range(rows))
        for row, prompt in enumerate(prompts_of(self.target, family, rows)):
            self.context.cache.reserve(row, sizes[row] if sizes else len(prompt) + 120)
            self.context.load(row, prompt)
        self.seed = 0

    @property
    def graphs(self) -> StepGraphs:
        return self.context.cache.graphs  # type: ignore[no-any-return]

    def step(self, count: int = 1, tree: bool = False) -> Tensor:
        """Run new tokens, and commit a path."""
        generator = torch.Generator().manual_seed(self.seed)
        self.seed += 1
        new = torch.randint(100, (len(self.rows), count), generator=generator)
        shape = (TREE, DEPTH) if tree else (None, None)
        logits = self.context.forward(self.rows, new, *shape).logits
        path = [0, 2] if tree else list(range(count))
        self.context.commit(self.rows, [path for _ in self.rows], new[:, path].tolist())
        return logits

    def repeated(self) -> Steps:
        """The same, with a captured forward of one token."""
        for _ in range(5):
            self.step()
        return self


def twins(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    sizes: tuple[int, ...] = (),
    capture: Any = record,
    family: str = "qwen2_vl",
) -> tuple[Steps, Steps]:
    """Equal contexts of two equal models, of which the first one's forwards are captured."""
    ordinary = Steps(rows, family, sizes)
    monkeypatch.setitem(graphs.CAPTURES, "cpu", capture)
    return Steps(rows, family, sizes), ordinary


PATTERN = [(1, False), (3, False), (3, True), (1, False), (4, False), (3, True)] * 4


def compare(ours: Steps, theirs: Steps) -> None:
    for count, tree in PATTERN:
        torch.testing.assert_close(ours.step(count, tree), theirs.step(count, tree), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["qwen2_vl", *RECURRENT])
def test_logits_of_mixed_steps_equal_the_ordinary_ones(monkeypatch: pytest.MonkeyPatch, family: str, rows: int) -> None:
    ours, theirs = twins(monkeypatch, rows, family=family)
    compare(ours, theirs)
    assert ours.graphs.replays >= 8
    assert theirs.context.cache.graphs is None


def test_a_long_row_before_a_short_one_at_the_end_of_the_arena_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = twins(monkeypatch, 2, sizes=(192, 64))
    for each in (ours, theirs):
        each.rows = [0]
        each.step(130)
        each.rows = [0, 1]
    cache = ours.context.cache
    assert cache.slots - cache.start(1) < cache.lengths[0]
    for _ in range(6):
        torch.testing.assert_close(ours.step(), theirs.step(), rtol=1e-4, atol=1e-3)
    assert ours.graphs.replays == 3


def test_padding_that_a_token_attends_to_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The known mistake: keys after those of a row are read."""
    ours, theirs = twins(monkeypatch, 2)
    right = graphs._mask

    monkeypatch.setattr(graphs, "_mask", lambda *step: torch.zeros_like(right(*step)))
    with pytest.warns(SaccadeWarning, match="gave other logits"):
        compare(ours, theirs)  # the comparison at capture refuses it, and ordinary steps remain
    assert not ours.graphs.replays


@pytest.mark.parametrize("is_noticed", [True, False])
def test_graphs_are_dropped_when_the_arena_moves(monkeypatch: pytest.MonkeyPatch, is_noticed: bool) -> None:
    """The known mistake: a graph that still writes to the memory of before."""
    ours, theirs = (each.repeated() for each in twins(monkeypatch, 2))
    (before,) = ours.graphs._steps.values()
    for each in (ours, theirs):
        each.context.cache.preallocate(each.context.cache.slots * 4)
    if not is_noticed:
        ours.context.cache.moves = ours.graphs._moves[0]
        with pytest.raises(Freed):
            compare(ours, theirs)
        return
    compare(ours, theirs)
    assert all(step is not before for step in ours.graphs._steps.values())


def test_graphs_are_dropped_when_a_weight_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (each.repeated() for each in twins(monkeypatch, 1))
    (before,) = ours.graphs._steps.values()
    for each in (ours, theirs):
        norm = each.target.decoder.norm.weight
        norm.data = norm.data.clone() * 3
    torch.testing.assert_close(ours.step(), theirs.step(), rtol=1e-4, atol=1e-3)
    (after,) = ours.graphs._steps.values()
    assert after is not before


@pytest.mark.usefixtures("captured")
def test_a_model_that_was_hooked_is_run_by_its_modules() -> None:
    steps, seen = Steps(1).repeated(), []
    replays = steps.graphs.replays
    handle = steps.target.layers[0].register_forward_hook(lambda *_: seen.append(1))
    steps.step()
    handle.remove()
    assert seen
    assert steps.graphs.replays == replays


@pytest.mark.usefixtures("captured")
def test_a_row_whose_segment_ends_inside_the_padding_runs_without_it() -> None:
    steps = Steps(1)
    cache = steps.context.cache
    room = cache.capacity(0) - cache.lengths[0]
    for _ in range(room // 3):
        steps.step(3)
    assert cache.lengths[0] > cache.capacity(0) - 4
    assert {shape.queries for shape in steps.graphs._steps} == {4}
    assert steps.graphs.replays >= room // 3 - 4


@pytest.mark.usefixtures("captured")
def test_values_that_a_failed_row_left_do_not_reach_its_neighbours() -> None:
    steps = Steps(2)
    cache = steps.context.cache
    slots = slice(cache.start(1), cache.start(1) + cache.capacity(1))
    with torch.inference_mode():
        for layer in cache.layers:
            layer.keys[:, slots] = float("nan")
            layer.values[:, slots] = float("nan")
    steps.context.forget(1)
    steps.rows = [0]
    for _ in range(6):
        assert bool(steps.step().isfinite().all())
    assert steps.graphs.replays


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(("most", "is_again"), [(1024, True), (1023, False)])
def test_a_cache_is_used_again_and_empty_where_the_next_one_may_be_as_large(most: int, is_again: bool) -> None:
    first = Steps(2).repeated()
    cache, target = first.context.cache, first.target
    assert cache.slots == 1024
    steps = dict(cache.graphs._steps)
    del first.context
    again = Context(target, 2, max_slots=most)
    assert (again.cache is cache) == is_again
    assert not is_again or steps == cache.graphs._steps
    assert steps
    assert again.cache.max_slots == most
    assert again.cache.lengths == [0, 0]
    assert not is_again or not any(layer.keys.any() or layer.values.any() for layer in cache.layers)
    assert Context(target, 2).cache is not cache  # in use


def _fails(function: Callable[[], Any], pool: Any) -> Any:
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


def _reads(function: Callable[[], Any], pool: Any) -> Any:
    def reading() -> Any:
        logits, hidden = function()
        logits.max().item()
        return logits, hidden

    return record(reading, pool)


@pytest.mark.parametrize(("capture", "reason"), [(_fails, "operation not permitted"), (_reads, "HostRead")])
def test_a_capture_that_fails_is_reported_once_and_ordinary_steps_go_on(
    monkeypatch: pytest.MonkeyPatch, capture: Any, reason: str
) -> None:
    ours, theirs = twins(monkeypatch, 2, capture=capture)
    with pytest.warns(SaccadeWarning, match=reason) as warnings:
        compare(ours, theirs)
    assert len(warnings) == 1
    assert not ours.graphs.replays


def test_graphs_are_captured_neither_on_a_cpu_nor_with_the_switch_off_nor_with_angles_that_depend_on_the_longest_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Target(FAMILIES["llava"].model()).executor.name == "lean"
    monkeypatch.setitem(graphs.CAPTURES, "cpu", record)
    target = Target(FAMILIES["llava"].model())
    assert isinstance(target.executor, GraphExecutor)
    target.text_config.rope_parameters = {**target.text_config.rope_parameters, "rope_type": "dynamic"}
    assert GraphExecutor.of(target, target.executor.decoder) is None
    monkeypatch.setenv(graphs.SWITCH, "lean")
    target = Target(FAMILIES["llava"].model())
    assert target.executor.name == "lean"
    assert target.new_cache(1).graphs is None


@pytest.mark.usefixtures("captured")
def test_hidden_states_are_those_that_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(1).repeated()
    steps.context.requirements.add_layers(1, 2)
    token = torch.tensor([[5]])
    for _ in range(5):
        output = steps.context.forward([0], token)
        steps.context.cache.drop([0])
        assert set(output.hidden) == {1, 2}
    monkeypatch.setattr(steps.target.executor, "enabled", False)
    plain = steps.context.forward([0], token)
    for layer, state in plain.hidden.items():
        torch.testing.assert_close(output.hidden[layer], state, rtol=1e-4, atol=1e-4)


def test_a_tensor_that_a_graph_reads_and_nobody_holds_is_noticed() -> None:
    tensors = [torch.ones(2), torch.ones(2)]
    replay, _ = record(lambda: torch.add(*tensors), None)
    replay()
    tensors.pop()
    with pytest.raises(Freed):
        replay()


# --------------------------------------------------------------------------- recurrent layers


@pytest.mark.parametrize("family", RECURRENT)
def test_rows_whose_states_are_apart_and_rows_that_are_dropped_keep_their_own(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Of three rows, the middle one's tokens are dropped, then it is absent, and then there again."""
    both = twins(monkeypatch, 3, family=family)
    tokens = torch.tensor([[100, 101], [110, 111], [120, 121]])
    for _ in range(6):
        seen = []
        for each in both:
            context = each.context
            seen.append([context.forward([0, 1, 2], tokens).logits])
            context.cache.drop([1])
            context.commit([0, 2], [[0, 1], [0]], [[100, 101], [120]])
            seen[-1].append(context.forward([0, 2], tokens[::2]).logits)
            context.commit([2], [[0, 1]], [[120, 121]])
            context.cache.drop([0])
        for ours, expected in zip(*seen, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)
    assert both[0].graphs.replays >= 6


@pytest.mark.parametrize("family", RECURRENT)
def test_a_later_prompt_starts_from_states_that_a_graph_left(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """A turn after an answer, one that departs within it, and another conversation in a cache that is used again."""
    first, *others = [Prompt(tuple(range(low, low + 30))) for low in (20, 40)]

    def answers(under_test: Engine) -> list[list[int]]:
        found = []
        for _ in range(2):
            batch, prompt = under_test.open(1), first
            for turn in (0, 3, 0):
                (decoding,) = plan(under_test.target, [prompt], max_new_tokens=12)
                row = batch.add(Request(prompt), decoding)
                while not batch.is_idle:
                    batch.step()
                found.append(row.output)
                kept = prompt.ids + tuple(row.output)
                prompt = Prompt((*kept[: len(kept) - turn], 50, 51, 52))
            (row,) = under_test.generate([Request(others[0])], max_new_tokens=12)
            found.append(row.tokens)
            del batch
        return found

    expected = answers(Engine(Target(FAMILIES[family].model())))
    monkeypatch.setitem(graphs.CAPTURES, "cpu", Overwriting().record)
    under_test = Engine(Target(FAMILIES[family].model()))
    assert answers(under_test) == expected
    assert caches(under_test)[0].replays > 20


@pytest.mark.usefixtures("captured")
def test_no_graph_runs_while_tokens_of_other_rows_are_pending() -> None:
    steps = Steps(2, "qwen3_5").repeated()
    replays, tokens = steps.graphs.replays, torch.tensor([[5]])
    for _ in range(4):
        steps.context.forward([0], tokens)
        steps.context.forward([1], tokens)
        steps.context.cache.drop([0, 1])
    assert {shape.rows for shape in steps.graphs._steps} == {(0, 1), (0,)}
    assert steps.graphs.replays == replays + 1


@pytest.mark.usefixtures("captured")
def test_experts_that_the_host_chooses_are_not_captured_and_nothing_is_said(recwarn: pytest.WarningsRecorder) -> None:
    model = FAMILIES["qwen3_5_moe"].model()
    assert isinstance(Target(model).executor, GraphExecutor)
    model.config.text_config._experts_implementation = "eager"
    assert Target(model).executor.name == "stock"
    assert not [each for each in recwarn if issubclass(each.category, SaccadeWarning)]


@pytest.mark.usefixtures("captured")
def test_memory_of_pending_tokens_is_within_what_graphs_of_a_hybrid_reserve() -> None:
    steps = Steps(2, "qwen3_5")
    for count in (1, 3, 20, 64) * 5:
        steps.context.forward([0, 1], torch.full((2, count), 5))
        steps.context.cache.drop([0, 1])
    assert len(steps.graphs._steps) == 4
    held = sum(tensor.nbytes for tensor in steps.graphs._held.values())
    assert 0 < held < steps.target.executor.reserved


def test_keys_come_in_few_sizes_that_hold_what_they_must() -> None:
    sizes = {keys_for(slots) for slots in range(1, 5000)}
    assert sorted(sizes) == [256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144]
    assert all(slots <= keys_for(slots) <= max(256, 1.5 * slots) for slots in range(1, 5000))


@pytest.mark.usefixtures("captured")
def test_a_chain_reads_as_many_keys_as_its_longest_row_needs() -> None:
    steps = Steps(2)
    cache = steps.context.cache
    cache.reserve(0, 400)
    cache.lengths[0] = 300
    shape = steps.graphs._chain_shape(Ahead([0, 1], [[5], [6]], 3, 90), [1, 1])
    assert shape is not None
    assert shape.keys == keys_for(303)
