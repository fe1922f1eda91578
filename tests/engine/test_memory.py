"""Memory is reserved before a row begins; what a slot holds, and what the vision tower gave, is used again."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kit import add, alone, engine, prompts

from architectures import ARCHITECTURES
from families import FAMILIES
from harness import drain
from saccade.draft.ensemble.ensemble import EnsembleDrafter, Multimodal
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.lookup import PromptLookup
from saccade.draft.merged import MergedDrafter
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, RunningBatch
from saccade.errors import InputError
from saccade.inputs.families import family_of, split
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.cache import QUANTUM, round_to_segment
from saccade.target_model.media_cache import tower_of
from saccade.target_model.selfcheck import self_check
from versions import MLLAMA


def needed(batch: RunningBatch, prompt: Prompt, n: int) -> int:
    """Bytes of a row, in target and draft model."""
    entry = batch.target.entry_bytes + batch.drafter.model.entry_bytes  # type: ignore[union-attr]
    return round_to_segment(len(prompt) + n + batch.drafter.facts.max_nodes) * entry  # type: ignore[union-attr]


def test_a_request_that_can_never_fit_is_refused_with_numbers() -> None:
    limit = needed(engine("chain").open(1), prompts()[0], 20)
    batch = engine("chain").open(2, kv_memory=limit)
    add(batch, prompts()[0], n=20)
    with pytest.raises(InputError, match=rf"{limit / 2**20:.1f} MiB; raise kv_memory"):
        add(batch, prompts()[0], n=20 + QUANTUM)
    drain(batch)


def test_a_row_waits_until_there_is_memory() -> None:
    one = engine("chain").open(1)
    limit = int(1.2 * max(needed(one, prompt, 100) for prompt in prompts()[:3]))
    batch = engine("chain").open(3, kv_memory=limit)
    rows = [add(batch, prompt, n=100) for prompt in prompts()[:3]]
    while not batch.is_idle:
        batch.step()
        assert sum(row.slot is not None for row in rows) <= 1
    for row, prompt in zip(rows, prompts(), strict=False):
        assert row.output == alone("chain", prompt, n=100)


def test_the_oldest_content_is_dropped_first() -> None:
    one = engine("chain").open(1)
    unlike = [Prompt((20 + place, *prompt.ids)) for place, prompt in enumerate(prompts()[:3])]  # share no prefix
    sizes = [needed(one, prompt, 100) for prompt in unlike]
    batch = engine("chain").open(4, kv_memory=sum(sizes) - min(sizes) // 2)
    for prompt in unlike:
        add(batch, prompt, n=100)
        drain(batch)
    held = [max(batch.context.shared_prefixes(range(4), prompt).values()) for prompt in unlike]
    assert held == [0, len(unlike[1]) - 1, len(unlike[2]) - 1]


def test_caches_of_target_and_draft_model_stay_within_the_limit() -> None:
    """Also where the first request takes most of it, so that growing with headroom would exceed it."""
    one, lengths = engine("chain").open(1), (330, 20, 20)
    limit = sum(needed(one, prompt, n) for prompt, n in zip(prompts(), lengths, strict=False))
    batch = engine("chain").open(3, kv_memory=limit)
    rows = [add(batch, prompts()[0], n=lengths[0])]
    batch.step()
    rows += [add(batch, prompt, n=n) for prompt, n in zip(prompts()[1:3], lengths[1:], strict=True)]
    batch.step()
    assert all(row.slot is not None for row in rows)
    drafting = batch.drafting.context.cache  # type: ignore[union-attr]
    assert batch.context.cache.nbytes + drafting.nbytes <= limit
    drain(batch)
    assert rows[0].output == alone("chain", prompts()[0], n=lengths[0])


def test_every_view_of_a_draft_model_is_counted() -> None:
    target, model = engine("chain").target, engine("chain").drafter.model  # type: ignore[union-attr]
    ensemble = EnsembleDrafter(model, Chain(4), [Multimodal(), Multimodal()])
    for drafter in (ensemble, MergedDrafter(ensemble, PromptLookup(gamma=4))):
        batch = Engine(target, drafter).open(2, kv_memory=2**20)
        assert batch.context.cache.max_slots == 2**20 // (target.entry_bytes + 2 * model.entry_bytes)


def test_a_head_s_bytes_are_counted_when_copies_are_merged_with_its_drafts() -> None:
    target = engine("chain").target
    head = HeadDrafter(build_head(HeadConfig.from_target(target, "eagle2")), target, Chain(4))
    batch = Engine(target, MergedDrafter(head, PromptLookup(gamma=4))).open(2, kv_memory=2**20)
    assert batch.context.cache.max_slots == 2**20 // (target.entry_bytes + head.facts.entry_bytes)


@pytest.mark.parametrize("name", ["mistral4", "kimi_k25", pytest.param("mllama", marks=MLLAMA)])
def test_what_a_row_needs_is_what_the_caches_allocate(name: str) -> None:
    """Latent attention caches what keys and values are made of; cross-attention caches pictures beside the tokens."""
    case = ARCHITECTURES[name]
    config = copy.deepcopy(case.model().config)
    if name != "mllama":
        config.get_text_config().kv_lora_rank = 24  # another size than that of the rotated part
    target = Target(type(case.model())(config))
    self_check(target)
    under_test = Engine(target, ModelDrafter(Target(case.draft_model()), Chain(3)))
    for kind in case.kinds:
        (prompt,) = split(config, case.row_inputs(kind, 0))
        batch = under_test.open(1)
        add(batch, prompt, n=4)
        drain(batch)
        size = batch.context.cache.nbytes + batch.drafting.context.cache.nbytes  # type: ignore[union-attr]
        batch = under_test.open(1, kv_memory=size)
        row = add(batch, prompt, n=4)
        batch.step()
        assert batch.kv_usage == 1
        drain(batch)
        assert row.error is None
        with pytest.raises(InputError, match="raise kv_memory"):
            add(under_test.open(1, kv_memory=size - 1), prompt, n=4)


def test_a_request_goes_where_the_longest_prefix_is() -> None:
    batch = engine("chain").open(3)
    first = [add(batch, prompt, n=8) for prompt in prompts()[:3]]
    drain(batch)
    for row, prompt in reversed(list(zip(first, prompts(), strict=False))):
        longer = Prompt((*prompt.ids, *row.output, 33, 44))
        again = add(batch, longer, n=8)
        drain(batch)
        assert again.stats.reused_tokens == len(longer) - 3  # all but the last answer's last token and the new ones
        assert again.output == alone("chain", longer, n=8)


@pytest.mark.parametrize("method", ["plain", "chain"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_prompt_that_is_cancelled_inside_a_video_never_leaks_into_another_ones(method: str, steps: int) -> None:
    first, other = prompts("video", "qwen2_5_vl")[0], prompts("video", "qwen2_5_vl")[2]
    swapped = Prompt(first.ids, other.media)
    if [m.digest for m in first.media] == [m.digest for m in other.media]:
        pytest.fail("the two videos are the same, so nothing could leak")
    expected = alone("plain", swapped, "qwen2_5_vl")
    (span,) = family_of(engine("plain", "qwen2_5_vl").target.config).media_spans(first)
    batch = engine(method, "qwen2_5_vl").open(1, prefill_chunk=span[0] + 2)
    row = add(batch, first)
    for _ in range(steps):
        batch.step()
    assert not row.output or steps > 1
    batch.cancel(row)
    again = add(batch, swapped)
    drain(batch)
    assert again.stats.reused_tokens <= span[0]
    assert again.output == expected


def test_nothing_is_shared_inside_a_medium_of_another_size() -> None:
    """Both begin with placeholders, which are the same ids whatever they stand for."""
    first, other = prompts("image", "qwen2_5_vl")[:2]
    batch = engine("chain", "qwen2_5_vl").open(1)
    config = batch.target.config
    ((begin, end),), ((start, stop),) = family_of(config).media_spans(first), family_of(config).media_spans(other)
    assert end - begin != stop - start
    mixed = Prompt((*first.ids[:begin], *other.ids[start:]), other.media)
    add(batch, first, n=5)
    drain(batch)
    again = add(batch, mixed, n=20)
    drain(batch)
    assert again.stats.reused_tokens == begin
    assert again.output == alone("plain", mixed, "qwen2_5_vl", n=20)


# --------------------------------------------------------------------------- pictures that come again


@contextmanager
def looks(*models: Any) -> Iterator[list[int]]:
    """Indices of the models whose towers ran, in order."""
    calls: list[int] = []
    handles = []
    for index, model in enumerate(models):
        tower = tower_of(model)
        assert tower is not None
        forward = tower.forward

        def counted(*given: Any, forward: Any = forward, index: int = index, **named: Any) -> Any:
            calls.append(index)
            return forward(*given, **named)

        tower.forward = counted
        handles.append(tower)
    try:
        yield calls
    finally:
        for tower in handles:
            del tower.forward


def pair(family: str, same: bool) -> Engine:
    case = FAMILIES[family]
    target = Target(case.model())
    draft = copy.deepcopy(target.model) if same else case.draft_model()
    if not same:
        with torch.no_grad():
            next(iter(tower_of(draft).parameters())).add_(0.01)  # type: ignore[union-attr]
    return Engine(target, ModelDrafter(Target(draft), Chain(3)))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_the_tower_runs_once_for_a_picture_that_comes_again(family: str) -> None:
    prompt = prompts("image", family)[0]
    under_test = Engine(Target(FAMILIES[family].model()))
    batch = under_test.open(3)
    with looks(under_test.target.model) as calls:
        rows = [add(batch, prompt) for _ in range(3)]
        drain(batch)
        once = len(calls)
        rows.append(add(batch, prompt))
        drain(batch)
        assert len(calls) == once == 1
    assert (batch.context.media.misses, batch.context.media.hits >= 2) == (1, True)
    assert {tuple(row.output) for row in rows} == {tuple(alone("plain", prompt, family))}


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("same", [True, False], ids=["equal towers", "other towers"])
def test_equal_towers_of_target_and_draft_look_once(family: str, same: bool) -> None:
    prompt = prompts("image", family)[0]
    under_test = pair(family, same)
    batch = under_test.open(1)
    with looks(under_test.target.model, under_test.drafter.model.model) as calls:  # type: ignore[union-attr]
        row = add(batch, prompt)
        drain(batch)
    assert len(calls) == (1 if same else 2)
    assert row.output == alone("plain", prompt, family)


def test_features_that_were_used_least_recently_go_when_bytes_run_out() -> None:
    first, second, third = prompts("image", "llava")[:3]
    under_test = Engine(Target(FAMILIES["llava"].model()))
    probe = under_test.open(1)
    add(probe, first, n=1)
    drain(probe)
    size = probe.context.media.nbytes
    batch = under_test.open(1, media_cache=2 * size)
    for prompt, misses in ((first, 1), (second, 2), (first, 2), (third, 3), (first, 3), (second, 4)):
        batch.context.forget(0)
        row = add(batch, prompt, n=3)
        drain(batch)
        assert row.error is None
        assert batch.context.media.misses == misses
        assert batch.context.media.nbytes <= 2 * size
