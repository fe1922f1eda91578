"""*Cost*: milliseconds of a step's parts at real sizes, with graphs and without, beside transformers and limits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from transformers import StaticCache
from transformers.cache_utils import DynamicCache

from benchmarks.device.kit import Finding, Kit, Piece, described
from benchmarks.device.shapes import HYBRID, QWEN3, QWEN7, Oracle, answer, head_of, model_of, prompt_of, target_of
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
from saccade.target_model.stock import replaced
from saccade.tree import DraftTree, ancestors_of
from saccade.verify.rule import Greedy

NODES, ROWS = (1, 4, 8, 16, 30, 60), (1, 4, 16, 64)
LEVELS = (1, 2, 4, 7, 8)
ANSWER = 96  # tokens of the answers whose steps are measured
HEADS = ("eagle3", "hivis", "dflash")
TREE = "large tree"
WORKSPACE = 8 * 2**30  # bytes that a measurement leaves free


def pieces(kit: Kit) -> Iterator[Piece]:
    near, *far = (24, 40) if kit.small else (1024, 8192, 32768)
    yield "memory of graphs", partial(memory, kit, near)
    yield f"{QWEN7}: passes behind {near}", partial(passes, kit, QWEN7, near)
    yield "transformers' step", partial(stock_step, kit, near)
    for kind in HEADS:
        yield f"{kind}: drafting behind {near}", partial(drafting, kit, kind, near)
    yield f"whole steps behind {near}", partial(steps, kit, near)
    for context in far:
        yield f"{QWEN7}: passes behind {context}", partial(passes, kit, QWEN7, context)
    yield f"{QWEN7}: verdict and commit", partial(verdict, kit, QWEN7, near)
    yield "vision tower", partial(vision, kit)
    yield f"{QWEN3}: drafting behind {near}", partial(drafting, kit, QWEN3, near)
    yield "transformers' step with a static cache, compiled", partial(stock_step, kit, near, compiled=True)
    yield f"{HYBRID}: passes behind {near}", partial(passes, kit, HYBRID, near)
    yield f"{HYBRID}: verdict and commit", partial(verdict, kit, HYBRID, near)


# -- passes --------------------------------------------------------------------------------------------------


def passes(kit: Kit, name: str, context: int) -> Iterator[Finding]:
    """One target pass of several rows' trees: the shapes of most worth first."""
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
        if kit.device.type == "cuda" and kit.recover() and needed + WORKSPACE > torch.cuda.mem_get_info()[0]:
            yield {"rows": rows, "line": f"{rows} rows of {nodes} left out, {needed / 2**30:.0f} GiB of entries"}
            continue
        filled = filled_context(target, rows, context)
        call = partial(filled.forward, range(rows), *tree_of(kit, target, rows, nodes))
        shape = {"model": name, "context": context, "rows": rows, "nodes": nodes}
        for switched in ways(target):
            replays = replays_of(filled)
            with switched:
                spent = kit.time(call, partial(filled.cache.drop, range(rows)))
            graphs = replays_of(filled) > replays
            found = {**shape, "graphs": graphs, "limits": limits(target, rows, nodes, context), **spent}
            yield {**found, "line": f"{rows} x {nodes}{' graph' if graphs else ''} {described(spent)}"}
            if not graphs:  # as the other way is, too
                break
        del filled, call


def replays_of(context: Context) -> int:
    return getattr(context.cache.graphs, "replays", 0)


def memory(kit: Kit, context: int) -> Iterator[Finding]:
    """What graphs take of the device's memory, beside what is set aside for all of a model's graphs."""
    target, shapes = target_of(kit, QWEN7), [(rows, nodes) for rows in (1, 4) for nodes in NODES]
    executor, filled = target.executor, filled_context(target, 4, context)
    if not getattr(executor, "enabled", False):
        yield {"line": f"no graphs on {kit.device.type}"}
        return

    def taken(times: int) -> int:
        for rows, nodes in shapes * times:
            filled.forward(range(rows), *tree_of(kit, target, rows, nodes))
            filled.cache.drop(range(rows))
        kit.recover()
        return torch.cuda.memory_reserved() if kit.device.type == "cuda" else 0

    with replaced([(executor, "enabled", False)]):
        before = taken(1)
    grown, aside = taken(4) - before, executor.reserved
    found = {"captured": len(shapes), "graph_bytes": grown, "reserved": aside}
    words = f"took {grown / 2**20:.4g} MiB" if kit.device.type == "cuda" else f"are not weighed on {kit.device.type}"
    yield {**found, "line": f"{len(shapes)} graphs {words}, {aside / 2**20:.4g} MiB are set aside"}


def filled_context(target: Target, rows: int, context: int) -> Context:
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


def ways(target: Target) -> list[Any]:
    """Contexts: with graphs, where there are any, and without."""
    without = [replaced([(target.executor, "enabled", False)])] if getattr(target.executor, "enabled", False) else []
    return [nullcontext(), *without]


def limits(target: Target, rows: int, nodes: int, context: int) -> dict[str, int]:
    """Bytes that a pass must read and operations that it must compute."""
    head, embedding = target.output_embeddings.weight, target.embedding_weight
    weights = [head, *(w for w in target.decoder.parameters() if w is not embedding)]
    read, used = sum(w.nbytes for w in weights), sum(w.numel() for w in weights)
    text = target.text_config
    width = text.num_attention_heads * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    attended = 4 * rows * nodes * context * width * len([s for s in target._shapes if s])
    return {"bytes": read + rows * context * target.entry_bytes, "operations": 2 * used * rows * nodes + attended}


# -- drafts --------------------------------------------------------------------------------------------------


def big_tree(kit: Kit) -> DynamicTree:
    return DynamicTree(2, 2, 4) if kit.small else DynamicTree(10, 6, 60)


def drafter_of(kit: Kit, kind: str, policy: Any) -> Drafter:
    if kind == QWEN3:
        draft = target_of(kit, QWEN3)
        return ModelDrafter(draft, policy, min(draft.vocab_size, target_of(kit, QWEN7).vocab_size))
    return HeadDrafter(head_of(kit, kind), target_of(kit, QWEN7), policy)


def drafting(kit: Kit, kind: str, context: int) -> Iterator[Finding]:
    """Drafts of chains and of a large tree after one emitted token."""
    target = target_of(kit, QWEN7)
    levels, more = ((7,), ()) if kit.small else (LEVELS, (4, 16))
    cases: list[tuple[str, int, Any]] = [(f"chain {k}", 1, Chain(k)) for k in levels]
    cases += [(TREE, 1, big_tree(kit))] * (kind != "dflash") + [("chain 7", rows, Chain(7)) for rows in more]
    for case, rows, policy in cases:
        if kit.left <= 0:
            yield {"line": f"left out from {case} on, no time left"}
            return
        propose = proposing(kit, drafter_of(kit, kind, policy), target, rows, context)
        spent = kit.time(propose, rounds=8)
        found = {"drafter": kind, "case": case, "rows": rows, "context": context, **spent}
        words = case if rows == 1 else f"{case} of {rows} rows"
        yield {**found, "line": f"{words} {described(spent)}"}


def proposing(kit: Kit, drafter: Drafter, target: Target, rows: int, context: int) -> Callable[[], DraftTree]:
    """Draft after prompts, again and again, each time after one more emitted token."""
    held = Context(target, rows)
    session, room = drafter.open(rows, held), context + 96
    for row in range(rows):
        prompt = prompt_of(kit, target.vocab_size, context, row)
        held.cache.reserve(row, room)
        session.begin(row, room)
        session.load(row, prompt, held.load(row, prompt))
    emitted, proposer = [[prompt_of(kit, target.vocab_size, 1, row).ids[0]] for row in range(rows)], TopProposer()
    return torch.inference_mode()(lambda: session.propose(range(rows), emitted, proposer, drafter.facts.max_depth))


def steps(kit: Kit, context: int) -> Iterator[Finding]:
    """Whole steps of the running batch: pass, drafts, verdict, commit and the host's own work."""
    target = target_of(kit, QWEN7)
    methods: dict[str, Drafter | None] = {"plain": None}
    for case, policy in {"chain 7": Chain(7), TREE: big_tree(kit)}.items():
        inner = drafter_of(kit, "eagle3", policy)
        methods[f"eagle3, {case}"] = Oracle(inner, lambda p: answer(kit, target.vocab_size, p, 2 * ANSWER), 0.7)
    for name, drafter in methods.items():
        for switched in ways(target):
            with switched:
                yield {"method": name, **_step(kit, Engine(target, drafter), context, name)}


def _step(kit: Kit, engine: Engine, context: int, name: str) -> Finding:
    prompt = prompt_of(kit, engine.target.vocab_size, context)
    (decoding,) = plan(engine.target, [prompt], max_new_tokens=ANSWER)
    batch = engine.open(1)

    def again() -> None:
        if batch.is_idle:
            row.append(batch.add(Request(prompt), decoding))
            while not row[-1].output:
                batch.step()
                if row[-1].error is not None:
                    raise row[-1].error

    row: list[Any] = []
    again()
    spent = kit.time(batch.step, again, rounds=30, warm=24)  # until forwards of all lengths were captured
    for each in row:
        if each.error is not None:
            raise each.error
    expected = answer(kit, engine.target.vocab_size, prompt, ANSWER)
    verdict = "same" if row[0].output == expected[: len(row[0].output)] else "WRONG"
    words = f"{name}{' with graphs' if getattr(engine.target.executor, 'enabled', False) else ''}"
    found = {"context": context, "WRONG": int(verdict != "same"), **spent}
    return {**found, "line": f"{words} {described(spent)}, {verdict}"}


# -- the rest ------------------------------------------------------------------------------------------------


def verdict(kit: Kit, name: str, context: int) -> Iterator[Finding]:
    """The greedy rule on logits of a tree, and the commit of a path."""
    target = target_of(kit, name)
    nodes = 8 if kit.small else 60
    tokens, mask, depth = tree_of(kit, target, 1, nodes)
    filled = filled_context(target, 1, context)
    valid = torch.ones(1, nodes, dtype=torch.bool).to(kit.device)
    parents = depth.new_zeros(1, nodes)  # all below the root, which makes no difference to the time
    tree = DraftTree(tokens, parents, depth, mask, valid, max_depth=nodes - 1, max_children=nodes - 1)
    output = filled.forward([0], tokens, mask, depth)
    filled.cache.drop([0])
    spent = kit.time(partial(Greedy().judge, [0], tree, output.logits, None, output))
    yield {"what": f"{name}, verdict", **spent, "line": f"verdict on {nodes} nodes {described(spent)}"}

    def ready() -> None:
        filled.cache.lengths[0] = context
        filled.forward([0], tokens, mask, depth)

    ready()
    path, ids = [[0, 1, nodes - 1]], [tokens[0, :3].tolist()]
    spent = kit.time(lambda: filled.commit([0], path, ids), ready)
    yield {"what": f"{name}, commit", **spent, "line": f"commit of 3 entries {described(spent)}"}


def vision(kit: Kit) -> Iterator[Finding]:
    """The vision tower on one picture of two sizes."""
    model, vision_config = model_of(kit, QWEN7), target_of(kit, QWEN7).config.vision_config
    width = 3 * vision_config.temporal_patch_size * vision_config.patch_size**2
    for side in (4,) if kit.small else (32, 72):
        pixels = torch.zeros(side * side, width, dtype=model.dtype, device=kit.device)
        grid = torch.tensor([[1, side, side]], device=kit.device)
        with torch.inference_mode():
            spent = kit.time(partial(model.get_image_features, pixel_values=pixels, image_grid_thw=grid), rounds=8)
        tokens = side * side // vision_config.spatial_merge_size**2
        yield {"tokens": tokens, **spent, "line": f"a picture of {tokens} tokens {described(spent)}"}


def stock_step(kit: Kit, context: int, compiled: bool = False) -> Iterator[Finding]:
    """One token of transformers' own modules with a dynamic cache, or compiled with a static one, which takes most
    of a minute."""
    if compiled and (kit.device.type != "cuda" or kit.left < 60):
        yield {"line": f"left out: {'no time left' if kit.device.type == 'cuda' else 'on CUDA alone'}"}
        return
    model, text = model_of(kit, QWEN7), target_of(kit, QWEN7).text_config
    cache = StaticCache(config=text, max_cache_len=context + 64) if compiled else DynamicCache()
    heads, dim = text.num_key_value_heads, text.hidden_size // text.num_attention_heads
    entry = torch.zeros(1, heads, context, dim, dtype=model.dtype, device=kit.device)
    for layer in range(text.num_hidden_layers):
        cache.update(entry, entry, layer)
    ids = torch.tensor([prompt_of(kit, text.vocab_size, 1).ids], device=kit.device)
    places = torch.full((3, 1, 1), context, device=kit.device)
    inputs = {"input_ids": ids, "position_ids": places, "past_key_values": cache}
    step = torch.compile(model.forward, mode="reduce-overhead") if compiled else model
    with torch.no_grad():  # as in `generate`
        spent = kit.time(lambda: step(**inputs, use_cache=True).logits, lambda: compiled or cache.crop(-1), rounds=8)
    what = "static cache, compiled" if compiled else "eager"
    yield {"what": what, "context": context, **spent, "line": f"{what} {described(spent)}"}
