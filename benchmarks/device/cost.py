"""*Cost*: milliseconds of a step's parts at real sizes, with graphs and without, beside transformers and limits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import StaticCache
from transformers.cache_utils import DynamicCache

from benchmarks.device.kit import Finding, Kit, Piece
from benchmarks.device.oracle import Oracle
from benchmarks.device.shapes import (
    HYBRID,
    QWEN3,
    QWEN7,
    answer,
    head_of,
    model_of,
    prompt_of,
    release,
    target_of,
)
from saccade.draft.drafter import Drafter
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.dynamic import DynamicTree
from saccade.draft.trees.policy import Chain, TopProposer
from saccade.engine import Engine, Request
from saccade.engine.row import plan
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.tree import DraftTree, ancestors_of
from saccade.verify.rule import Greedy

NODES, ROWS = (1, 4, 8, 16, 30, 60), (1, 4, 16, 64)
LEVELS = (1, 2, 4, 7, 8)
HEADS = ("eagle3", "hivis", "dflash")
BIG_TREE = DynamicTree(top=10, max_depth=6, total=60)
WORKSPACE = 8 * 2**30
"""Bytes that a measurement leaves free."""


def pieces(kit: Kit) -> Iterator[Piece]:
    near, *far = (24, 40) if kit.small else (1024, 8192, 32768)
    yield f"{QWEN7}: passes behind {near}", partial(passes, kit, QWEN7, near)
    yield "transformers' step", partial(stock_step, kit, near)
    for kind in HEADS:
        yield f"{kind}: drafting behind {near}", partial(drafting, kit, kind, near)
    yield f"whole steps behind {near}", partial(steps, kit, near)
    for context in far:
        yield f"{QWEN7}: passes behind {context}", partial(passes, kit, QWEN7, context)
    yield "verdict and commit", partial(verdict, kit, near)
    yield "vision tower", partial(vision, kit)
    yield f"{QWEN3}: drafting behind {near}", partial(drafting, kit, QWEN3, near)
    yield "transformers' step with a static cache, compiled", partial(compiled_step, kit, near)
    yield f"{HYBRID}: passes behind {near}", partial(passes, kit, HYBRID, near)


# -- passes --------------------------------------------------------------------------------------------------


def passes(kit: Kit, name: str, context: int) -> Iterator[Finding]:
    """One target pass of several rows' trees: the shapes of most worth first."""
    if name == HYBRID:
        release()  # of the other models
    target = target_of(kit, name)
    grid = [(1, nodes) for nodes in (1, 8, 60, 30, 4, 16)]
    grid += [(rows, nodes) for nodes in (1, 8, 30) for rows in ROWS[1:]]
    if kit.small:
        grid = [(1, 1), (1, 8), (2, 1), (2, 8)]
    for rows, nodes in grid:
        if kit.left <= 0:
            yield {"line": f"left out from {rows} rows of {nodes} on, no time left"}
            return
        needed = rows * (context + 128) * target.entry_bytes
        if kit.device.type == "cuda" and needed + WORKSPACE > torch.cuda.mem_get_info()[0]:
            yield {"rows": rows, "nodes": nodes, "line": f"{rows} rows left out, {needed / 2**30:.0f} GiB of entries"}
            continue
        filled = behind(target, rows, context)
        tokens, mask, depth = tree_of(kit, target, rows, nodes)
        call = partial(filled.forward, range(rows), tokens, mask, depth)
        for graphs in (True, False):
            with switched(target, graphs) as is_on:
                if graphs and not is_on:
                    continue
                spent = kit.time(call, partial(filled.cache.drop, range(rows)))
            replays = getattr(filled.cache.graphs, "replays", 0)
            found = {
                "model": name,
                "context": context,
                "rows": rows,
                "nodes": nodes,
                "graphs": graphs,
                "replays": replays,
            }
            found |= {"limits": limits(target, rows, nodes, context), **spent}
            yield {**found, "line": f"{rows} x {nodes}{' graph' if graphs else ''} {spent['ms']:.3g} ms"}
        del filled


def behind(target: Target, rows: int, context: int) -> Context:
    """A context whose rows have so many entries, which hold zeros: that costs what any entries cost."""
    made = Context(target, rows)
    for row in range(rows):
        made.cache.reserve(row, context + 96)
    if made.cache.states is not None:  # recurrent states begin with a prompt
        for row in range(rows):
            made.load(row, Prompt((1, 2, 3)))
    made.cache.lengths[:rows] = [context] * rows
    return made


def tree_of(kit: Kit, target: Target, rows: int, nodes: int) -> tuple[Any, Any, Any]:
    """Random trees, the same for every row: tokens, mask and depth on the device."""
    rng = random.Random(nodes)
    parents = [rng.randrange(max(node, 1)) for node in range(nodes)]
    ids = prompt_of(kit, target.vocab_size, rows * nodes).ids
    tokens = torch.tensor(ids).view(rows, nodes).to(kit.device)
    if nodes == 1:
        return tokens, None, None
    mask = ancestors_of(torch.tensor([parents]), nodes)
    depth = mask.sum(2) - 1
    return tokens, mask.to(kit.device), depth.to(kit.device)


@contextmanager
def switched(target: Target, graphs: bool) -> Iterator[bool]:
    """Whether forwards run as graphs, while they are switched on or off."""
    fast = target.executor
    was = getattr(fast, "enabled", False)
    if was:
        fast.enabled = graphs  # type: ignore[attr-defined]
    try:
        yield bool(was and graphs)
    finally:
        if was and (graphs is False or fast.enabled):  # type: ignore[attr-defined]
            fast.enabled = True  # type: ignore[attr-defined]


def limits(target: Target, rows: int, nodes: int, context: int) -> dict[str, int]:
    """Bytes that a pass must read and operations that it must compute."""
    weights = [*target.decoder.parameters(), target.output_embeddings.weight]
    embedding = target.embedding_weight
    read = sum(w.nbytes for w in weights if w is not embedding or w is target.output_embeddings.weight)
    used = sum(w.numel() for w in weights if w is not embedding or w is target.output_embeddings.weight)
    text = target.text_config
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    attended = 4 * rows * nodes * context * width * len([s for s in target._shapes if s])
    return {"bytes": read + rows * context * target.entry_bytes, "operations": 2 * used * rows * nodes + attended}


# -- drafts --------------------------------------------------------------------------------------------------


def drafter_of(kit: Kit, kind: str, policy: Any) -> Drafter:
    if kind == QWEN3:
        return ModelDrafter(
            target_of(kit, QWEN3), policy, min(target_of(kit, name).vocab_size for name in (QWEN3, QWEN7))
        )
    return HeadDrafter(head_of(kit, kind), target_of(kit, QWEN7), policy)


def drafting(kit: Kit, kind: str, context: int) -> Iterator[Finding]:
    """Drafts of chains and of a large tree behind one emitted token."""
    target = target_of(kit, QWEN7)
    cases: list[tuple[str, int, Any]] = [(f"chain {k}", 1, Chain(k)) for k in ((7,) if kit.small else LEVELS)]
    if kind != "dflash":
        cases.append(("tree of 60", 1, DynamicTree(2, 2, 4) if kit.small else BIG_TREE))
    cases += [("chain 7", rows, Chain(7)) for rows in (() if kit.small else (4, 16))]
    for case, rows, policy in cases:
        if kit.left <= 0:
            yield {"line": f"left out from {case} on, no time left"}
            return
        propose = proposing(kit, drafter_of(kit, kind, policy), target, rows, context)
        spent = kit.time(propose, rounds=8)
        levels = policy.max_depth
        found = {"drafter": kind, "case": case, "rows": rows, "levels": levels, "context": context, **spent}
        yield {**found, "line": f"{case} x {rows} {spent['ms']:.3g} ms ({spent['host_ms']:.3g} of the host)"}


def proposing(kit: Kit, drafter: Drafter, target: Target, rows: int, context: int) -> Callable[[], DraftTree]:
    """Draft behind prompts, again and again, each time behind one more emitted token."""
    held = Context(target, rows)
    session, room = drafter.open(rows, held), context + 96
    for row in range(rows):
        prompt = prompt_of(kit, target.vocab_size, context, row)
        held.cache.reserve(row, room)
        session.reserve(row, room)
        session.load(row, prompt, held.load(row, prompt))
    emitted, proposer = [[prompt_of(kit, target.vocab_size, 1, row).ids[0]] for row in range(rows)], TopProposer()
    return torch.inference_mode()(lambda: session.propose(range(rows), emitted, proposer, drafter.max_depth))


def steps(kit: Kit, context: int) -> Iterator[Finding]:
    """Whole steps of the running batch: pass, drafts, verdict, commit and the host's own work."""
    target = target_of(kit, QWEN7)
    methods: dict[str, Drafter | None] = {"plain": None}
    count = 8 if kit.small else 96
    for case, policy in {"chain 7": Chain(7), "tree": DynamicTree(2, 2, 4) if kit.small else BIG_TREE}.items():
        inner = drafter_of(kit, "eagle3", policy)
        methods[f"eagle3, {case}"] = Oracle(inner, lambda p: answer(kit, target.vocab_size, p, count + 96), 0.7)
    for name, drafter in methods.items():
        for graphs in (True, False):
            with switched(target, graphs) as is_on:
                if graphs and not is_on:
                    continue
                yield {"method": name, "graphs": graphs, **_step(kit, Engine(target, drafter), context, count, name)}


def _step(kit: Kit, engine: Engine, context: int, count: int, name: str) -> Finding:
    prompt = prompt_of(kit, engine.target.vocab_size, context)
    (decoding,) = plan(engine.target, [prompt], max_new_tokens=count)
    batch = engine.open(1)

    def again() -> None:
        if batch.is_idle:
            row.append(batch.add(Request(prompt), decoding))
            while not row[-1].output:
                batch.step()

    row: list[Any] = []
    again()
    spent = kit.time(batch.step, again, rounds=30)
    for each in row:
        if each.error is not None:
            raise each.error
    expected = answer(kit, engine.target.vocab_size, prompt, count)
    verdict = "same" if row[0].output == expected[: len(row[0].output)] else "WRONG"
    return {
        **spent,
        "context": context,
        "WRONG": int(verdict != "same"),
        "line": f"{name} {spent['ms']:.3g} ms, {verdict}",
    }


# -- the rest ------------------------------------------------------------------------------------------------


def verdict(kit: Kit, context: int) -> Iterator[Finding]:
    """The greedy rule on logits of a tree, and the commit of a path."""
    target = target_of(kit, QWEN7)
    nodes = 8 if kit.small else 60
    tokens, mask, depth = tree_of(kit, target, 1, nodes)
    filled = behind(target, 1, context)
    assert mask is not None
    parents = torch.where(mask.cumsum(2) == mask.sum(2, keepdim=True) - 1, 1, 0).argmax(2)
    valid = torch.ones(1, nodes, dtype=torch.bool).to(kit.device)
    tree = DraftTree(tokens, parents, depth, mask, valid, max_depth=nodes - 1, max_children=nodes - 1)
    output = filled.forward([0], tokens, mask, depth)
    filled.cache.drop([0])
    spent = kit.time(partial(Greedy().judge, [0], tree, output.logits, None, output))
    yield {"what": "verdict", **spent, "line": f"verdict on {nodes} nodes {spent['ms']:.3g} ms"}

    def ready() -> None:
        filled.cache.lengths[0] = context
        filled.forward([0], tokens, mask, depth)

    ready()
    path, ids = [[0, 1, nodes - 1]], [tokens[0, :3].tolist()]
    spent = kit.time(lambda: filled.commit([0], path, ids), ready)
    yield {"what": "commit", **spent, "line": f"commit of 3 entries {spent['ms']:.3g} ms"}


def vision(kit: Kit) -> Iterator[Finding]:
    """The vision tower on one picture of two sizes."""
    model, vision_config = model_of(kit, QWEN7), target_of(kit, QWEN7).config.vision_config
    if kit.pretend is not None or model.config.model_type != "qwen2_5_vl":
        yield {"line": "left out: the pretend device does not run this tower"}
        return
    width = 3 * vision_config.temporal_patch_size * vision_config.patch_size**2
    for side in (4,) if kit.small else (32, 72):
        pixels = torch.zeros(side * side, width, dtype=model.dtype, device=kit.device)
        grid = torch.tensor([[1, side, side]], device=kit.device)
        with torch.inference_mode():
            spent = kit.time(partial(model.get_image_features, pixel_values=pixels, image_grid_thw=grid), rounds=8)
        tokens = side * side // vision_config.spatial_merge_size**2
        yield {"tokens": tokens, **spent, "line": f"a picture of {tokens} tokens {spent['ms']:.3g} ms"}


def _entries(kit: Kit, cache: Any, context: int) -> None:
    """Fill a cache of transformers."""
    text = target_of(kit, QWEN7).text_config
    heads, dim = text.num_key_value_heads, text.hidden_size // text.num_attention_heads
    entry = torch.zeros(1, heads, context, dim, dtype=model_of(kit, QWEN7).dtype, device=kit.device)
    for layer in range(text.num_hidden_layers):
        cache.update(entry, entry, layer)


def _stock_inputs(kit: Kit, context: int) -> dict[str, Any]:
    ids = torch.tensor([prompt_of(kit, target_of(kit, QWEN7).vocab_size, 1).ids], device=kit.device)
    return {"input_ids": ids, "position_ids": torch.full((3, 1, 1), context, device=kit.device), "use_cache": True}


def stock_step(kit: Kit, context: int) -> Iterator[Finding]:
    """One token of transformers' own modules behind a dynamic cache."""
    model, cache, inputs = model_of(kit, QWEN7), DynamicCache(), _stock_inputs(kit, context)
    if model.config.model_type != "qwen2_5_vl":
        inputs["position_ids"] = inputs["position_ids"][0]
    _entries(kit, cache, context)
    with torch.inference_mode():
        spent = kit.time(lambda: model(**inputs, past_key_values=cache).logits, lambda: cache.crop(-1))
    yield {"what": "eager", "context": context, **spent, "line": f"eager {spent['ms']:.3g} ms"}


def compiled_step(kit: Kit, context: int) -> Iterator[Finding]:
    """The same behind a static cache, compiled; takes most of a minute."""
    if kit.device.type != "cuda" or kit.left < 60:
        yield {"line": f"left out: {'no time left' if kit.device.type == 'cuda' else 'on CUDA alone'}"}
        return
    model, inputs = model_of(kit, QWEN7), _stock_inputs(kit, context)
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=context + 64)
    _entries(kit, cache, context)
    step = torch.compile(model.forward, mode="reduce-overhead")
    with torch.inference_mode():
        spent = kit.time(lambda: step(**inputs, past_key_values=cache).logits, rounds=8)
    yield {"what": "compiled", "context": context, **spent, "line": f"static cache, compiled {spent['ms']:.3g} ms"}
