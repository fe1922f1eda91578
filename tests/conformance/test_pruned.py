"""Drafting after pruned visual tokens changes no token, with a smaller model and with the target itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from families import FAMILIES
from harness import answer, assert_equals_generate, assert_one_shot, draft, prompt, target, tokens
from saccade.draft.ensemble.ensemble import EnsembleDrafter, Pruned
from saccade.draft.pruning import Pruning
from saccade.draft.trees.policy import Chain
from saccade.draft.trees.sage import SageTree
from saccade.engine import Engine, Request
from saccade.target_model.context import Context, PrefillResult

pytestmark = pytest.mark.executors

NAMES = ("llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "internvl")
NEW = 24
POLICIES: dict[str, Any] = {"chain": Chain(4), "sage": SageTree()}
CASES = [
    (name, kind) for name in (*NAMES, "llava_onevision") for kind in ("image", "video") if kind in FAMILIES[name].kinds
]


@cache
def engine(name: str, drafter: str, policy: str) -> Engine:
    model = target(name) if drafter == "self" else draft(name)
    pruned = Pruned(Pruning(keep_images=0.5, keep_videos=0.5))
    return Engine(target(name), EnsembleDrafter(model, POLICIES[policy], [pruned]))


@pytest.mark.some_families
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafter", ["smaller", "self"])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_tokens_equal_generate(name: str, kind: str, drafter: str, policy: str, rows: int) -> None:
    outputs = assert_equals_generate(engine(name, drafter, policy), name, kind, rows)
    assert sum(output.stats.drafted_tokens for output in outputs) > 0
    if rows == 3:
        assert sum(output.stats.accepted_tokens for output in outputs) > 0


@pytest.mark.some_families
@pytest.mark.parametrize("drafter", ["smaller", "self"])
@pytest.mark.parametrize("name", NAMES)
def test_a_second_turn_with_a_new_image_equals_one_shot(name: str, drafter: str) -> None:
    session, first = engine(name, drafter, "chain").open(1), prompt(name, "image")
    said = answer(session.engine, first, session=session).tokens
    drafting: Any = session.drafting
    reads: list[PrefillResult] = []
    load = drafting.context.load
    drafting.context.load = lambda *given: reads.append(load(*given)) or reads[-1]
    output = assert_one_shot(session, name, FAMILIES[name].continued("image", 0, said))
    assert output.stats.reused_tokens == len(first) + NEW - 1
    (read,) = reads
    assert read.start >= len(first)  # what was emitted last it has not been shown
    assert drafting.context.dropped(0)[0] < len(first) < drafting.context.dropped(0)[-1]


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_rows_with_and_without_images_share_a_batch(name: str) -> None:
    kinds = ["text", "image", "images2"]
    requests = [Request(prompt(name, kind)) for kind in kinds]
    for drafter in ("smaller", "self"):
        outputs = engine(name, drafter, "sage").generate(requests, max_new_tokens=NEW)
        assert tokens(outputs) == [FAMILIES[name].reference(kind, n=NEW)[0] for kind in kinds]


def test_without_pruning_self_speculation_is_always_right() -> None:
    """Two contexts on the same weights, one of them filled by way of the other's prompt."""
    own = target("qwen3_vl")
    drafter = EnsembleDrafter(own, Chain(4), [Pruned(Pruning(keep_images=1.0, keep_videos=1.0))])
    (output,) = assert_equals_generate(Engine(own, drafter), "qwen3_vl", "image", 1, 20)
    assert output.stats.target_passes == 3, "after the pass that ends the prompt, which gives five tokens too"
    assert output.stats.accepted_tokens == 16


def test_the_target_s_prompt_is_read_once() -> None:
    """Attention comes from the target's own prefill: no second pass is made for it."""
    own, asked = target("llava"), prompt("llava", "image")
    widths: list[int] = []

    def note(_: torch.nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        widths.append(kwargs["inputs_embeds"].shape[1])

    handle = own.decoder.register_forward_pre_hook(note, with_kwargs=True)
    answer(engine("llava", "smaller", "chain"), asked, 2)
    handle.remove()
    assert widths[0] == len(asked)
    assert max(widths[1:]) < len(asked), "verification alone follows (on the stock modules, because of the hook)"


@pytest.mark.some_families
@pytest.mark.parametrize("name", NAMES)
def test_the_target_drafting_for_itself_looks_at_the_image_once(name: str) -> None:
    own, asked = target(name), prompt(name, "image")
    base = own.model.base_model
    tower = next(m for n in ("vision_tower", "visual") if (m := getattr(base, n, None)) is not None)
    looks: list[torch.nn.Module] = []
    handle = tower.register_forward_pre_hook(lambda module, _: looks.append(module))
    session = engine(name, "self", "chain").open(1)
    output = answer(session.engine, asked, session=session)
    handle.remove()
    assert len(looks) == 1
    assert output.tokens == FAMILIES[name].reference("image", n=NEW)[0]

    drafting: Any = session.drafting
    assert session.context.media is drafting.context.media
    assert session.context.media.misses == 1
    again = Context(own, 1)
    again.load(0, asked, drafting.context.dropped(0))  # which looks for itself
    kept = again.lengths[0]
    for one, other in zip(again.cache.export(0), drafting.context.cache.export(0), strict=True):
        torch.testing.assert_close(one[0], other[0][:, :, :kept], rtol=0.0, atol=0.0)
