"""Exact mode in bfloat16: every lossless method gives plain decoding's tokens, whatever runs beside a row."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import harness
import saccade
from families import FAMILIES, STOCK, FamilyCase
from saccade import pocket
from saccade.draft.ensemble.ensemble import EnsembleDrafter, Pruned
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.draft.pruning import Pruning
from saccade.engine import Engine, Request
from saccade.engine.row import plan
from saccade.errors import ModelError
from saccade.inputs.families.family import Prompt
from saccade.loading import adapt
from saccade.methods import METHODS
from saccade.pocket import draw
from saccade.target_model import exact, lean
from saccade.target_model.adapter import Target
from saccade.target_model.exact import SteadyLinear
from saccade.vlm import VLM

pytestmark = pytest.mark.formats

NEW = 16
TASKS = ("scene", "receipt")
HEADS = [name for name in HEAD_KINDS if name in pocket.head_paths()]
SHIPPED = [
    name
    for name, method in METHODS.items()
    if method.lossless and (name in HEADS or name not in HEAD_KINDS) and name not in ("mtp", "pard")
]
"""Lossless methods with a draft model, with none, and with the heads of the built-in pair, which has neither a layer
of multi-token prediction nor a mask token."""
REFUSED = ("gemma3", "qwen3_vl_moe", "ministral3", "mistral3_ministral3", *STOCK)
NAMES = [name for name in FAMILIES if name not in REFUSED]
DRAFTERS = {
    **dict.fromkeys(("plain", "lookup", "merged", "self", "pard", *HEAD_KINDS), "chain"),
    **{tree: tree for tree in (*harness.POLICIES, "sage")},
}
"""Kinds of drafters with their trees; the names of trees stand for draft models."""


def model(name: str) -> Any:
    return FAMILIES[name].model().to(torch.bfloat16)


@cache
def target(name: str) -> Target:
    return Target(model(name), exact=True)


def engine(name: str, method: str) -> Engine:
    build = harness.DRAFTERS.get(method, harness.DRAFTERS["model"])
    return Engine(target(name), build(target(name), harness.draft(name), harness.TREES[DRAFTERS[method]]))


@cache
def pair() -> VLM:
    return saccade.load("pocket", dtype="bfloat16", exact=True)


def answers(method: str, rows: int) -> list[list[int]]:
    """The built-in pair's answers about one sample of each task, with so many rows at a time."""
    with pair().using(method).batch(rows) as batch:
        tickets = [batch.add(draw(7, task).messages(), max_new_tokens=NEW) for task in TASKS]
        return [ticket.result().tokens for ticket in tickets]


@cache
def plain_answers() -> list[list[int]]:
    return answers("plain", 1)


def prompts(name: str) -> list[Prompt]:
    """Rows of different lengths: two of text, one with each kind of media."""
    case: FamilyCase = FAMILIES[name]
    counts = {kind: 2 if kind == "text" else 1 for kind in case.kinds}
    return [row for kind, count in counts.items() for row in harness.prompts(case, case.inputs(kind, rows=count))]


@cache
def plain(name: str) -> tuple[tuple[int, ...], ...]:
    """Plain decoding's tokens, every row alone."""
    return tuple(tuple(together(Engine(target(name)), [prompt])[0]) for prompt in prompts(name))


def together(method: Engine, rows: list[Prompt]) -> list[list[int]]:
    return harness.tokens(method.generate([Request(row) for row in rows], max_new_tokens=NEW))


def staggered(method: Engine, rows: list[Prompt], chunk: int) -> list[list[int]]:
    """Rows that join one by one, their prompts in chunks of a few tokens, two at a time."""
    batch = method.open(2, prefill_chunk=chunk)
    added = []
    for place, row in enumerate(rows):
        (decoding,) = plan(method.target, [row], max_new_tokens=NEW - place % 3)
        added.append(batch.add(Request(row), decoding))
        for _ in range(place + 1):
            batch.step()
    harness.drain(batch)
    assert not any(row.error for row in added)
    return [row.output for row in added]


@pytest.mark.some_families
@pytest.mark.singly
@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("method", DRAFTERS)
@pytest.mark.parametrize("name", NAMES)
def test_every_method_gives_plain_decoding_s_tokens_at_every_batch_size(name: str, method: str, batch: int) -> None:
    method = "lookup" if method == "self" and not FAMILIES[name].is_visual else method
    under_test, rows = engine(name, method), prompts(name)
    answered = [tokens for i in range(0, len(rows), batch) for tokens in together(under_test, rows[i : i + batch])]
    assert tuple(map(tuple, answered)) == plain(name)


@pytest.mark.singly
@pytest.mark.parametrize("rows", [1, len(TASKS)])
@pytest.mark.parametrize("method", SHIPPED)
def test_every_method_of_the_built_in_pair_gives_plain_decoding_s_tokens(method: str, rows: int) -> None:
    assert answers(method, rows) == plain_answers()


@pytest.mark.singly
@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("method", ["plain", "chain", "static", "lookup"])
@pytest.mark.parametrize("name", ["llama", "mistral", "llava_onevision", "qwen2_5_vl"])
def test_chunks_of_prompts_and_rows_that_come_and_go_change_no_token(name: str, method: str, chunk: int) -> None:
    answered = staggered(engine(name, method), prompts(name), chunk)
    assert [list(full[: len(tokens)]) for full, tokens in zip(plain(name), answered, strict=True)] == answered


@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_a_reused_prefix_changes_no_token(name: str) -> None:
    """The second turn continues from entries that verification wrote, plain decoding in an empty cache from none."""
    session, first = engine(name, "dynamic").open(1), prompts(name)[-1]
    said = harness.answer(session.engine, first, NEW, session=session).tokens
    second = Prompt((*first.ids, *said, *first.ids[:5]), first.media)
    output = harness.answer(session.engine, second, NEW, session=session)
    assert output.stats.reused_tokens >= len(first)
    assert output.tokens == together(Engine(target(name)), [second])[0]


def test_attention_that_a_drafter_reads_of_the_prompt_changes_no_token() -> None:
    """It is read from stock modules, whose sums differ."""
    name = "llava"
    pruning = Pruning(keep_images=0.5, keep_by="attention")
    reader = EnsembleDrafter(harness.draft(name), harness.POLICIES["chain"], [Pruned(pruning)])
    assert tuple(tuple(together(Engine(target(name), reader), [row])[0]) for row in prompts(name)) == plain(name)


def rows_as_they_come(patched: pytest.MonkeyPatch) -> None:
    """Products of as many rows as there are."""
    patched.setattr(SteadyLinear, "__call__", SteadyLinear.multiply)
    patched.setattr(lean, "pieces", lambda count, sizes: [count])


def usual_attention(patched: pytest.MonkeyPatch) -> None:
    attend = lean.Layout.attend
    patched.setattr(lean.Layout, "attend", lambda *given, kernel, **more: attend(*given, **more))


@pytest.mark.parametrize("mistake", [rows_as_they_come, usual_attention])
def test_products_or_attention_of_varying_shapes_are_noticed(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At load, by the bits of a tree; in float32, since bfloat16 rounds most differences of a tiny model away."""
    if mistake is rows_as_they_come and 1 in target("llama")._fast.decoder._sizes:  # type: ignore[union-attr]
        pytest.skip("this processor's products agree for every number of rows")
    mistake(monkeypatch)
    mistaken = FAMILIES["qwen3"].model()
    with pytest.raises(ModelError, match="does not hold"):
        Target(mistaken, exact=True)


@pytest.mark.parametrize("name", REFUSED)
def test_decoders_of_other_architectures_are_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(ModelError, match="Exact mode needs a decoder of the Llama"):
        adapt(FAMILIES[name].model(), exact=True)


def test_a_model_that_is_hooked_after_it_was_loaded_is_refused() -> None:
    own = Target(model("llama"), exact=True)
    handle = own.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ModelError, match="changed after it was loaded"):
        together(Engine(own), prompts("llama")[:1])
    handle.remove()
    assert tuple(together(Engine(own), prompts("llama")[:1])[0]) == plain("llama")[0]


def test_another_number_of_threads_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are divided among threads, and may add up in another order."""
    own = Target(model("llama"), exact=True)
    monkeypatch.setattr(exact, "agreeing_sizes", lambda product: (1, 16))
    assert own.is_lean
    assert own._fast is not None
    assert own._fast.decoder._sizes != (1, 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert own.is_lean
    assert own._fast.decoder._sizes == (1, 16)


def test_a_context_that_float64_cannot_sum_is_refused() -> None:
    long = model("llama")
    long.config.max_position_embeddings = 2**21
    with pytest.raises(ModelError, match="sums over at most"):
        Target(long, exact=True)
