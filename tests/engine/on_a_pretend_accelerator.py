"""Every method on a device that the host must not wait for: its CPU tokens, one wait a step, no upload that blocks.

The device is pretended (see `pretend_device`), so that this is tested without a GPU. The host would wait for a real one
wherever it counts a wait here; that it waits nowhere else, and how long kernels take, cannot be seen.

`PYTHONPATH=src:tests python tests/engine/on_a_pretend_accelerator.py` shows the counts of the built-in pair's methods,
without graphs and with them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from families import FAMILIES, VOCAB
from numerals import TokenList
from pretend_device import NAME, Counts, MixedDevices, OnPretend, PretendDevice
from recorded_graphs import captured_on
from saccade.draft.ensemble.ensemble import EnsembleDrafter, Multimodal, Pruned
from saccade.draft.heads.head import Head, HeadConfig, build_head
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.pruning import Pruning
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.engine.costs import Pacer
from saccade.engine.row import plan
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt
from saccade.methods import build, get
from saccade.methods.compositions import Models
from saccade.pocket import draw
from saccade.target_model import cache, exact, graphs, token_blocks
from saccade.target_model.adapter import Target
from saccade.target_model.cache import on_device
from saccade.vlm import load

CASE = FAMILIES["llava"]
NEW = 6
ROWS = 2
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 12}
SMALL = {"tree": "dynamic", "top": 2, "max_depth": 2, "total": 4}
CHAIN = {"tree": "chain", "gamma": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    **{method: {} for method in ("plain", "static-tree", "prompt-lookup", "sage", "tabed")},
    **dict.fromkeys(("eagle2", "hivis", "dream", "eagle3", "msd", "vispec", "hydra"), SMALL),
    **{kind: {"tree": "oneshot", "total": 4, "max_depth": 2} for kind in ("medusa", "peagle")},
    **{method: {"gamma": 4} for method in ("fly", "lvspec", "random-loosening")},
    **dict.fromkeys(("self-spec", "specvlm"), CHAIN),
    "dynamic-tree": SMALL,
    **{method: {"gamma": 3} for method in ("chain", "pard")},
    "lookup-merge": {"gamma": 2, "lookup_tokens": 3},
    "grammar": {},
}
"""Methods with options that keep them quick. Chains that end where the drafter is unsure (kangaroo) are not among them:
they wait for the drafter's confidence after every guess."""
FEW_UPLOADS = {*HEAD_KINDS, "plain", "chain", "pard", "static-tree", "dynamic-tree"} & set(OPTIONS)
"""Methods whose steps send at most three tensors to the device: random numbers, what drafting and verification need of
the host, and the places of entries that move."""
PREFILL_WAITS = 6
"""Waits of the first step at most: its own, one in which transformers checks the placeholders of all pictures, and two
per row whose picture the drafter sees pruned by attention."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendDevice]:
    with PretendDevice() as opened:
        yield opened


@functools.cache
def target(place: str) -> Target:
    return Target(CASE.model().to(place))


@functools.cache
def draft_model(place: str) -> Target:
    model = CASE.draft_model().to(place)
    model.config.pard_token = 3
    return Target(model)


@functools.cache
def head(kind: str, place: str) -> Head:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = build_head(HeadConfig.from_target(target("cpu"), kind))
    return made.to(place)


def engine(method: str, place: str, **options: Any) -> Engine:
    if method == "tabed":  # with views that need no tokenizer
        views: list[Any] = [Multimodal(), Pruned(Pruning(0.5, 0.5, "uniform"))]
        return Engine(target(place), EnsembleDrafter(draft_model(place), Chain(3), views))
    model = draft_model(place) if get(method).needs == "draft model" else None
    trained = head(method, place) if method in HEAD_KINDS else None
    parts = Models(target(place), model, special_ids=(0, 1, 2), head=trained)
    return build(method, parts, **{**OPTIONS[method], **options})


@dataclass
class Ran:
    """Tokens per row, and the counts of steps that read prompts and of those after them."""

    tokens: list[list[int]]
    prefill: list[Counts] = field(default_factory=list)
    steps: list[Counts] = field(default_factory=list)


def run(
    under_test: Engine,
    sampled: bool,
    device: PretendDevice | None = None,
    rows: int = ROWS,
    new: int = NEW,
    prompts: Sequence[Prompt] = (),
    **more: Any,
) -> Ran:
    prompts = prompts or split(under_test.target.config, CASE.inputs("image", rows=rows))
    decoding = plan(under_test.target, prompts, max_new_tokens=new, **(SAMPLED if sampled else {}), **more)
    batch = under_test.open(len(prompts))
    rows_of = [
        batch.add(Request(prompt, seed=seed), own)
        for seed, (prompt, own) in enumerate(zip(prompts, decoding, strict=True))
    ]
    ran = Ran([row.output for row in rows_of])
    while not batch.is_idle:
        reads = not all(row.output for row in rows_of)
        if device is None:
            batch.step()
            continue
        with device.counting() as counts:
            batch.step()
        (ran.prefill if reads else ran.steps).append(counts)
    for row in rows_of:
        if row.error is not None:
            raise row.error
    return ran


@functools.cache
def cpu_tokens(method: str, sampled: bool) -> list[list[int]]:
    return run(engine(method, "cpu"), sampled).tokens


DRAWN = ("plain", "chain", "prompt-lookup", "eagle2", "sage")
LIKE_OTHERS = (
    *("plain", "chain", "static-tree", "prompt-lookup", "eagle2", "eagle3", "hivis", "msd", "vispec", "hydra"),
    *("self-spec", "fly", "random-loosening", "sage", "dynamic-tree"),
)
"""Methods that other tests below run, or whose parts are those of others: only the slow tests run them here."""
CASES: list[Any] = [
    *(pytest.param(method, False, marks=[pytest.mark.slow] if method in LIKE_OTHERS else []) for method in OPTIONS),
    *((method, True) for method in DRAWN),
]


@pytest.mark.parametrize(("method", "sampled"), CASES)
def test_a_method_gives_its_cpu_tokens_and_waits_once_a_step(device: PretendDevice, method: str, sampled: bool) -> None:
    assert target(NAME).is_lean
    ran = run(engine(method, NAME), sampled, device)
    assert ran.tokens == cpu_tokens(method, sampled)
    assert ran.steps
    for counts in ran.steps:
        assert sum(counts.waits.values()) == 1, counts.waits
        assert "engine/step.py" in next(iter(counts.waits))
        assert not counts.blocking
        assert method not in FEW_UPLOADS or counts.sent.total() <= 3, counts.sent
    for counts in ran.prefill:
        assert sum(counts.waits.values()) <= PREFILL_WAITS, counts.waits
        assert not any("target_model" in place for place in counts.blocking), counts.blocking


@pytest.mark.parametrize("method", ["plain", "chain", "dynamic-tree"])
def test_host_work_fits_between_the_launches_of_a_step_and_its_wait(device: PretendDevice, method: str) -> None:
    under_test = engine(method, NAME)
    (prompt,) = split(under_test.target.config, CASE.inputs("image", rows=1))
    (decoding,) = plan(under_test.target, [prompt], max_new_tokens=NEW)
    batch = under_test.open(1)
    batch.add(Request(prompt), decoding)
    batch.step()
    seen = list[tuple[int, int]]()
    while not batch.is_idle:
        with device.counting() as counts:
            batch.meanwhile = lambda: seen.append((counts.launches.total(), counts.waits.total()))
            batch.step()
        launches, waits = seen.pop()
        assert not seen
        assert (waits, counts.waits.total()) == (0, 1)
        assert launches > 0.9 * counts.launches.total()


@pytest.mark.parametrize("method", ["chain", "specvlm"])
def test_paced_drafts_wait_once_a_step(device: PretendDevice, method: str) -> None:
    paced = engine(method, NAME)
    paced.pacer = Pacer(3, 0.1)
    ran = run(paced, False, device, new=12)
    assert ran.tokens == run(engine(method, "cpu"), False, new=12).tokens
    assert ran.steps
    for counts in ran.steps:
        assert sum(counts.waits.values()) <= 1, counts.waits
        assert not counts.blocking


class Lines(TokenList):
    """Four tokens that are forced, one of thirty, and so on."""

    def packed(self, matcher: list[int]) -> bytes:
        mask, place = np.zeros(VOCAB, np.bool_), len(matcher) % 5
        mask[20 + place if place < 4 else slice(60, 90)] = True
        return np.packbits(mask, bitorder="little").tobytes()


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("method", ["grammar", "prompt-lookup", "chain", "static-tree", "eagle2"])
def test_rows_with_forms_upload_nothing_that_blocks_and_wait_a_few_times(
    device: PretendDevice, method: str, sampled: bool
) -> None:
    """For the verdict, and for the drafter's tokens: at every level that forms mask, and to join them.

    The joined trees, by which scores are masked, are known on the host.
    """
    options: dict[str, Any] = {"logits_processor": [Lines()], "new": 60}
    ran = run(engine(method, NAME), sampled, device, **options)
    assert ran.tokens == run(engine(method, "cpu"), sampled, **options).tokens
    assert 1 < len(ran.steps) < 20
    for counts in ran.steps:
        assert not counts.blocking
        most = 1 if method == "grammar" else 2 if method == "prompt-lookup" else 2 + 2 * 5
        assert sum(counts.waits.values()) <= most, counts.waits
        assert not any("tree.py" in place for place in counts.waits), counts.waits


@pytest.mark.parametrize(
    ("method", "rows"),
    [
        *(pytest.param(method, 1, marks=pytest.mark.slow) for method in ("plain", "chain")),
        ("plain", ROWS),
        ("dynamic-tree", 1),
        ("eagle2", 1),
        pytest.param("dream", ROWS, marks=pytest.mark.slow),
    ],
)
def test_captured_steps_give_cpu_tokens_in_a_fraction_of_the_launches_and_wait_once(
    device: PretendDevice, monkeypatch: pytest.MonkeyPatch, method: str, rows: int
) -> None:
    alone = run(engine(method, NAME), False, device, rows, new=14)
    monkeypatch.setitem(graphs.CAPTURES, NAME, captured_on(device))
    monkeypatch.setenv(graphs.SWITCH, "graphs")
    models = [Target(make().to(NAME)) for make in (CASE.model, CASE.draft_model)]
    trained = head(method, NAME) if method in HEAD_KINDS else None
    under_test = build(method, Models(*models, head=trained), **OPTIONS[method])
    first, again = (run(under_test, False, device, rows, new=14) for _ in range(2))
    assert first.tokens == again.tokens == alone.tokens
    few = [counts for counts in again.steps if counts.launches["graph"]]
    assert len(few) > len(again.steps) / 2
    usual = median(counts.launches.total() for counts in alone.steps)
    assert min(counts.launches.total() for counts in few) < 0.6 * usual
    for counts in few:
        if sum(counts.waits.values()) == 1:  # nothing was captured in it
            assert not counts.blocking
    assert sum(sum(counts.waits.values()) == 1 for counts in few) > len(few) / 2


@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_captured_step_of_a_hybrid_takes_few_launches_and_waits_once(
    device: PretendDevice, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    case = FAMILIES["qwen3_5"]
    prompts = split(case.model().config, case.inputs("text", rows=rows))
    alone = run(Engine(Target(case.model().to(NAME))), False, device, prompts=prompts, new=14)
    monkeypatch.setitem(graphs.CAPTURES, NAME, captured_on(device))
    monkeypatch.setenv(graphs.SWITCH, "graphs")
    under_test = Engine(Target(case.model().to(NAME)))
    first, again = (run(under_test, False, device, prompts=prompts, new=14) for _ in range(2))
    assert first.tokens == again.tokens == alone.tokens
    for before, counts in zip(alone.steps, again.steps, strict=True):
        assert counts.launches["graph"] == 2  # the forward, and the commit
        assert counts.launches.total() < 0.1 * before.launches.total()
        assert sum(counts.waits.values()) == 1, counts.waits
        assert not counts.blocking


@pytest.mark.parametrize(("of_target", "of_drafter"), [(NAME, "cpu"), ("cpu", NAME)])
@pytest.mark.parametrize(
    ("method", "sampled"),
    [("chain", True), *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("chain", "dynamic-tree"))],
)
def test_a_draft_model_on_another_device_than_the_target_gives_the_same_tokens(
    device: PretendDevice, method: str, sampled: bool, of_target: str, of_drafter: str
) -> None:
    parts = Models(target(of_target), draft_model(of_drafter))
    ran = run(build(method, parts, **OPTIONS[method]), sampled, device)
    assert ran.tokens == cpu_tokens(method, sampled)


@pytest.mark.parametrize(
    "method", [*(pytest.param(method, marks=pytest.mark.slow) for method in ("plain", "chain")), "dynamic-tree"]
)
def test_exact_mode_gives_its_cpu_tokens_and_waits_no_more_than_the_usual_one(
    device: PretendDevice, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(exact, "DEVICES", ("cpu", NAME))

    def tokens(place: str, counted: PretendDevice | None) -> Ran:
        parts = Models(Target(CASE.model().to(place), exact=True), draft_model(place))
        return run(build(method, parts, **OPTIONS[method]), False, counted)

    ran = tokens(NAME, device)
    assert ran.tokens == tokens("cpu", None).tokens
    for counts in ran.steps:
        assert sum(counts.waits.values()) == 1, counts.waits
        assert not counts.blocking


@pytest.mark.parametrize("method", [pytest.param("dynamic-tree", marks=pytest.mark.slow), "eagle2"])
def test_sampling_on_a_tree_of_full_size_takes_few_more_launches_than_greedy_decoding(
    device: PretendDevice, method: str
) -> None:
    """60 nodes in 6 levels; of a model of two layers, which leaves the rule more than its usual share."""
    full = {"tree": "dynamic", "top": 10, "max_depth": 6, "total": 60}
    launches = []
    for sampled in (False, True):
        ran = run(engine(method, NAME, **full), sampled, device, rows=1)
        launches.append(max(counts.launches.total() for counts in ran.steps))
    assert launches[1] <= 1.2 * launches[0]


# --------------------------------------------------------------------------- launches of the built-in pair

LAUNCHES = {"plain": 245, "chain": 440, "dynamic-tree": 580, "eagle2": 552, "hivis": 564, "sage": 960}
"""Launches of a greedy step of the built-in pair at most, by method: a target of 16 layers, a draft model of 2."""


@functools.cache
def pocket(method: str) -> tuple[Engine, Prompt]:
    """An engine of the built-in pair on the device, and a prompt."""
    loaded = load("pocket", executor="lean", method=method)
    sample = draw(900_100, "chart", "verbose")
    models = [loaded.target.model, *([] if loaded.draft_model is None else [loaded.draft_model.model])]
    target, *draft = (Target(model.to(NAME)) for model in models)
    head = loaded.engine.drafter.head.to(NAME) if isinstance(loaded.engine.drafter, HeadDrafter) else None
    parts = Models(target, draft[0] if draft else None, special_ids=(0, 1, 2), head=head)
    prompt = loaded.processor.prompt(sample.question, images=[sample.image])
    return build(method, parts, **({"gamma": 5} if method == "chain" else {})), prompt


def counted(device: PretendDevice, method: str, sampled: bool) -> list[Counts]:
    under_test, prompt = pocket(method)
    return run(under_test, sampled, device, prompts=[prompt], new=16).steps


@pytest.mark.parametrize(
    "method", [*list(LAUNCHES)[:3], *(pytest.param(m, marks=pytest.mark.slow) for m in list(LAUNCHES)[3:])]
)
def test_a_step_takes_few_launches_and_its_attention_one_kernel_in_every_layer(
    device: PretendDevice, method: str
) -> None:
    for counts in counted(device, method, False):
        assert counts.launches.total() <= LAUNCHES[method]
        assert counts.launches["attention"]
        assert not counts.launches["aten::_safe_softmax"]  # of scores that are held
        assert not counts.launches["attention: padding of the mask"]


@pytest.mark.parametrize("rows", [1, 3])
def test_masks_of_trees_reach_attention_as_its_kernel_reads_them(
    device: PretendDevice, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Of the queries' dtype, with rows and beginning at multiples of eight numbers; also of rows of unlike lengths."""
    seen, plain = [], token_blocks.F.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **more: Any) -> Tensor:
        if attn_mask is not None and isinstance(attn_mask, OnPretend):
            offsets = attn_mask.storage_offset(), *attn_mask.stride()[:-1]
            seen.append((attn_mask.dtype == q.dtype, *(offset % 8 for offset in offsets)))
        return plain(q, k, v, attn_mask, **more)

    monkeypatch.setattr(token_blocks.F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(token_blocks, "MAX_PADDING", 0)  # so that every row has a call of its own
    ids = [tuple(range(40, 90 + 7 * row)) for row in range(rows)]
    ran = run(engine("dynamic-tree", NAME), False, device, prompts=[Prompt(each) for each in ids], new=12)
    assert set(seen) == {(True, 0, 0, 0, 0)}
    assert not any(counts.launches["attention: padding of the mask"] for counts in (*ran.prefill, *ran.steps))


def test_attention_by_cudnn_is_off(device: PretendDevice) -> None:
    """It prepares a plan for every new number of entries, which takes longer than the step."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    Target(CASE.model().to(NAME))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


# --------------------------------------------------------------------------- the known mistakes


def _with_an_item(values: Any, place: torch.device) -> Tensor:
    sent = on_device(values, place)
    sent.max().item()
    return sent


PLANTED: dict[str, Any] = {
    "an item": _with_an_item,
    "an upload that blocks": lambda values, place: torch.tensor(values, device=place),
    "memory that is not pinned": lambda values, place: torch.tensor(values).to(place, non_blocking=True),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wait_in_a_step_is_seen(name: str, monkeypatch: pytest.MonkeyPatch, device: PretendDevice) -> None:
    monkeypatch.setattr(cache, "on_device", PLANTED[name])
    for counts in run(engine("plain", NAME), False, device).steps:
        assert sum(counts.waits.values()) > 1 if name == "an item" else counts.blocking


def test_a_tensor_left_on_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch, device: PretendDevice) -> None:
    monkeypatch.setattr(cache, "on_device", lambda values, place: torch.tensor(values))
    with pytest.raises((MixedDevices, AssertionError)):
        run(engine("plain", NAME), False, device)


# --------------------------------------------------------------------------- the device itself


def test_what_the_host_waits_for_is_counted(device: PretendDevice) -> None:
    numbers = torch.arange(3, device=NAME)
    for waits in (
        lambda: numbers.tolist(),
        lambda: numbers[0].item(),
        lambda: bool((numbers > 1).any()),
        lambda: numbers.cpu(),
        lambda: (numbers > 1).nonzero(),
        lambda: numbers[numbers > 1],
        lambda: numbers[torch.tensor([0])],
        lambda: torch.zeros(3, dtype=torch.long).copy_(numbers),
        lambda: torch.equal(numbers, numbers),
    ):
        with device.counting() as counts:
            waits()
        assert sum(counts.waits.values()) == 1


def test_what_goes_to_the_device_waits_unless_it_is_pinned_and_not_to_block(device: PretendDevice) -> None:
    host = torch.ones(3)
    with device.counting() as counts:
        host.to(NAME), host.to(NAME, non_blocking=True), host.pin_memory().to(NAME)
        torch.tensor([1], device=NAME)
        torch.zeros(3, device=NAME).copy_(host)
    assert (sum(counts.blocking.values()), sum(counts.sent.values())) == (5, 0)
    with device.counting() as counts:
        host.pin_memory().to(NAME, non_blocking=True)
        torch.zeros(3, device=NAME).copy_(host.pin_memory(), non_blocking=True)
    assert (sum(counts.blocking.values()), sum(counts.sent.values())) == (0, 2)


if __name__ == "__main__":
    with PretendDevice() as opened:
        for how in ("ordinary", "graphs"):
            if how == "graphs":
                graphs.CAPTURES[NAME] = captured_on(opened)
                pocket.cache_clear()
            for name in LAUNCHES:
                for draws in (False, True):
                    *_, ran = (counted(opened, name, draws) for _ in range(3))
                    typical = sorted(ran, key=lambda counts: counts.launches.total())
                    print(f"{name:13} {'sampled' if draws else 'greedy':8} {how:8} {typical[len(typical) // 2]}")
