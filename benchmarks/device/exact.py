"""*Exact*: tokens on the device against transformers' `generate` there, with TF32 off.

A difference is a tie where the logits of the two tokens, in the reference, are no further apart than roundings of the
number format move two logits (twice `TOLERANCE`, in standard deviations of the logits); anything else is WRONG.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import saccade
from assistants import assistant_model
from benchmarks import pocket_pair
from benchmarks.device.kit import Finding, Kit, Piece
from benchmarks.device.shapes import Oracle
from families import FAMILIES, reset_rope_deltas
from mtp_kit import save as save_with_mtp
from saccade.draft.assistant import AssistantDrafter
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.heads.mtp import load_mtp
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.dynamic import DynamicTree
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.engine.row import plan
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt
from saccade.loading import adapt, load_processor
from saccade.pocket import draft_path, draw, head_path, head_paths, target_path
from saccade.target_model.adapter import Target
from saccade.target_model.agreement import TOLERANCE
from saccade.target_model.graphs import CAPTURES

TASKS = ("scene", "chart", "receipt", "document")
NEW = 16  # tokens of a tiny model's answer
TREE = DynamicTree(top=3, max_depth=4, total=12)
POLICIES: dict[str, Any] = {"chain": Chain(4), "tree": TREE}
FIRST = ("qwen2_5_vl", "qwen3_5")
OTHERS = ("qwen3_vl", "qwen3_5_moe", "gemma3", "llava", "idefics3", "mistral", "nemotron_h", "lfm2")


class Reference(NamedTuple):
    """An answer, and its logits ``[n, V]`` at every token; None where nothing may differ."""

    tokens: list[int]
    logits: Tensor | None = None


def pieces(kit: Kit) -> Iterator[Piece]:
    yield "built-in pair in float32", partial(pocket, kit, "float32")
    for name in FIRST:
        yield name, partial(family, kit, name)
    yield "built-in pair in bfloat16", partial(pocket, kit, "bfloat16")
    yield "deepseek_v3 (MLA) and its MTP", partial(prediction, kit)
    yield "gemma4 and its assistant", partial(assistant, kit)
    yield "EAGLE-3 on llava", partial(head, kit, "llava", "eagle3")
    yield "DFlash on llava", partial(head, kit, "llava", "dflash")
    yield "executors", partial(executors, kit)
    yield "exact mode in bfloat16", partial(exact_mode, kit)
    yield "a storm of arrivals", partial(storm, kit)
    yield "reuse of a prefix", partial(prefix, kit)
    yield "two threads", partial(threads, kit)
    for name in OTHERS:
        yield name, partial(family, kit, name)


# -- comparing -----------------------------------------------------------------------------------------------


def compare(expected: Reference, got: Sequence[int], dtype: torch.dtype) -> Finding:
    """Whether two answers are the same, and if not, whether they part at a tie."""
    pairs = list(zip(expected.tokens, got, strict=False))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return {"verdict": "same" if len(expected.tokens) == len(got) else "WRONG", "at": len(pairs)}
    if expected.logits is None:
        return {"verdict": "WRONG", "at": at}
    logits, bound = expected.logits[at].float(), 2 * TOLERANCE[dtype]
    gap = float((logits[expected.tokens[at]] - logits[got[at]]) / logits[logits.isfinite()].std())
    return {"verdict": "tie" if gap <= bound else "WRONG", "at": at, "gap": gap, "bound": bound}


def judged(case: str, expected: Sequence[Reference], got: Sequence[Sequence[int]], dtype: torch.dtype) -> Finding:
    """A finding of all answers of a case."""
    verdicts = [compare(a, b, dtype) for a, b in zip(expected, got, strict=True)]
    counts = {name: sum(v["verdict"] == name for v in verdicts) for name in ("same", "tie", "WRONG")}
    parted = [v for v in verdicts if v["verdict"] != "same"]
    gaps = [f"{v['verdict']} at {v['at']}, gap {v.get('gap', float('nan')):.2g}" for v in parted]
    words = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    line = f"{case}: {words}{' (' + '; '.join(gaps) + ')' if gaps else ''}"
    return {"case": case, **counts, "differences": gaps, "line": line}


@torch.no_grad()
def reference(kit: Kit, model: Any, inputs: Sequence[dict[str, Tensor]], count: int) -> list[Reference]:
    """Greedy answers of `generate`, one after the other; those of the pretend device are the CPU's."""
    place = torch.device("cpu") if kit.pretend is not None else kit.device
    model, found = model.to(place), []
    for each in inputs:
        reset_rope_deltas(model)
        moved = {k: v.to(place, model.dtype if v.is_floating_point() else v.dtype) for k, v in each.items()}
        options = {"max_new_tokens": count, "do_sample": False, "output_logits": True}
        out = model.generate(**moved, **options, return_dict_in_generate=True)
        tokens = out.sequences[0, moved["input_ids"].shape[1] :].tolist()
        found.append(Reference(tokens, torch.stack([step[0] for step in out.logits]).float().cpu()))
    reset_rope_deltas(model)
    return found


def answers(engine: Engine, prompts: Sequence[Prompt], count: int) -> list[list[int]]:
    outputs = engine.generate([Request(prompt) for prompt in prompts], max_new_tokens=count)
    return [list(output.tokens) for output in outputs]


# -- the built-in pair ---------------------------------------------------------------------------------------


class Pocket(NamedTuple):
    """The built-in pair on the device, its prompts, and their answers by `generate`."""

    vlm: saccade.VLM
    prompts: list[Prompt]
    expected: list[Reference]
    count: int


@cache
def pocket_of(kit: Kit, dtype: str) -> Pocket:
    count, prompts = (12, 1) if kit.small else (48, 3)
    models = [pocket_pair.load(path, dtype, "cpu") for path in (target_path(), draft_path())]
    processor = load_processor(str(target_path()))
    drawn = [draw(pocket_pair.FIRST_SEED + at, TASKS[at % len(TASKS)]) for at in range(prompts)]
    asked = [processor.prompt(each.messages()) for each in drawn]
    stock = copy.deepcopy(models[0])
    expected = reference(kit, stock, [pocket_pair.stock_inputs(stock, [each]) for each in asked], count)
    heads = [head_path(kind) for kind in head_paths()]
    moved = [model.to(kit.device) for model in models]
    vlm = saccade.VLM(moved[0], processor, drafter=moved[1], heads=heads, method="chain")
    return Pocket(vlm, asked, expected, count)


def pocket(kit: Kit, dtype: str) -> Iterator[Finding]:
    pair = pocket_of(kit, dtype)
    methods = ("plain", "chain", "dynamic-tree", "sage", "auto", *head_paths())
    for method in methods[:2] if kit.small and dtype == "bfloat16" else methods:
        if kit.left <= 0:
            return
        got = answers(pair.vlm.using(method).engine, pair.prompts, pair.count)
        yield judged(method, pair.expected, got, getattr(torch, dtype))


def executors(kit: Kit) -> Iterator[Finding]:
    """The same answers by graphs, by ordinary launches and by the stock modules."""
    pair = pocket_of(kit, "float32")
    drafter = ModelDrafter(adapt(_loaded(kit, draft_path()), drafts=True), TREE)
    for name in ("graphs", "lean", "stock"):
        if name == "graphs" and kit.device.type not in CAPTURES:
            yield {"case": name, "line": f"no graphs on {kit.device.type}"}
            continue
        target = Target(_loaded(kit, target_path()), executor=name)
        got = answers(Engine(target, drafter), pair.prompts, pair.count)
        yield judged(name, pair.expected, got, torch.float32) | {"executor": target.executor.name}


def _loaded(kit: Kit, path: Path, dtype: str = "float32") -> Any:
    return pocket_pair.load(path, dtype, str(kit.device))


def exact_mode(kit: Kit) -> Iterator[Finding]:
    """Bit for bit: chains and trees give plain decoding's tokens in bfloat16, ties included."""
    pair = pocket_of(kit, "bfloat16")
    target = Target(_loaded(kit, target_path(), "bfloat16"), exact=True)
    plain = [Reference(tokens) for tokens in answers(Engine(target), pair.prompts, pair.count)]
    drafter = pair.vlm.draft_model
    assert drafter is not None
    for policy in (Chain(5), TREE):
        got = answers(Engine(target, ModelDrafter(drafter, policy)), pair.prompts, pair.count)
        yield judged(type(policy).__name__, plain, got, torch.bfloat16)


def storm(kit: Kit) -> Iterator[Finding]:
    """Requests that arrive while others run, in a batch with fewer rows than requests."""
    pair, rng = pocket_of(kit, "float32"), random.Random(0)
    for method in ("plain", "chain"):
        engine = pair.vlm.using(method).engine
        plans = plan(engine.target, pair.prompts, max_new_tokens=pair.count)
        waiting = [rng.randrange(len(pair.prompts)) for _ in range(4 if kit.small else 16)]
        batch, rows = engine.open(2 if kit.small else 4, prefill_chunk=64), list[tuple[int, Any]]()
        while waiting or not batch.is_idle:
            while waiting and (batch.is_idle or rng.random() < 0.4):
                place = waiting.pop()
                rows.append((place, batch.add(Request(pair.prompts[place]), plans[place])))
            batch.step()
        for _, row in rows:
            if row.error is not None:
                raise row.error
        expected = [pair.expected[place] for place, _ in rows]
        yield judged(f"{method}, {len(rows)} requests", expected, [row.output for _, row in rows], torch.float32)


def prefix(kit: Kit) -> Iterator[Finding]:
    """The same prompt twice in one session: the second time most of it is in the cache."""
    pair = pocket_of(kit, "float32")
    engine = pair.vlm.using("chain").engine
    session = engine.open(1)
    for case in ("first", "again"):
        (output,) = engine.generate([Request(pair.prompts[0])], session, max_new_tokens=pair.count)
        found = judged(case, pair.expected[:1], [list(output.tokens)], torch.float32)
        reused = output.stats.reused_tokens
        yield {**found, "reused": reused, "line": f"{found['line']}, {reused} tokens reused"}


def threads(kit: Kit) -> Iterator[Finding]:
    """Two threads with models of their own, on streams of their own where the device has streams."""
    pair = pocket_of(kit, "float32")

    def work(engine: Engine) -> list[list[int]]:
        with torch.cuda.stream(torch.cuda.Stream() if kit.device.type == "cuda" else None):
            return answers(engine, pair.prompts, pair.count)

    drafts = [ModelDrafter(adapt(_loaded(kit, draft_path()), drafts=True), Chain(4)) for _ in range(2)]
    engines = [Engine(Target(_loaded(kit, target_path())), draft) for draft in drafts]
    kit.sync()  # the weights' own stream, for which the threads' streams do not wait
    with ThreadPoolExecutor(2) as pool:
        for place, got in enumerate(pool.map(work, engines)):
            yield judged(f"thread {place}", pair.expected, got, torch.float32)


# -- tiny families -------------------------------------------------------------------------------------------


Tiny = tuple[Target, list[Prompt], list[Reference]]
"""A tiny random model on the device, its prompts, and their answers by `generate`."""


def tiny(kit: Kit, name: str, kinds: Sequence[str] = ()) -> Tiny:
    case = FAMILIES[name]
    rows = [case.row_inputs(kind, row) for kind in kinds or case.kinds[:2] for row in range(1 if kit.small else 2)]
    expected = reference(kit, case.model(), rows, NEW)
    target = adapt(case.model().to(kit.device))
    return target, [split(target.config, each)[0] for each in rows], expected


def judge(kit: Kit, model: Tiny, drafters: dict[str, Any]) -> Iterator[Finding]:
    target, prompts, expected = model
    for case, drafter in drafters.items():
        if kit.left <= 0:
            return
        got = answers(Engine(target, drafter), prompts, NEW)
        yield {**judged(case, expected, got, torch.float32), "executor": target.executor.name}


def family(kit: Kit, name: str) -> Iterator[Finding]:
    draft = adapt(FAMILIES[name].draft_model().to(kit.device), drafts=True)
    drafters = {case: ModelDrafter(draft, policy) for case, policy in POLICIES.items()}
    yield from judge(kit, tiny(kit, name), {"plain": None, **drafters})


def assistant(kit: Kit) -> Iterator[Finding]:
    model = tiny(kit, "gemma4")
    helper = adapt(assistant_model("gemma4").to(kit.device), drafts=True)
    yield from judge(kit, model, {"plain": None, "assistant": AssistantDrafter(helper, model[0], Chain(3))})


def head(kit: Kit, name: str, kind: str) -> Iterator[Finding]:
    """A head of random weights, whose drafts are the answers' own tokens four times out of five."""
    target, prompts, expected = model = tiny(kit, name)
    known = {prompt.ids: each.tokens for prompt, each in zip(prompts, expected, strict=True)}
    options = {"mask_token": 5, "block": 5} if kind == "dflash" else {}
    made = build_head(HeadConfig.from_target(target, kind, **options)).to(kit.device)
    policies = {"chain": POLICIES["chain"]} if kind == "dflash" else POLICIES
    heads = {case: HeadDrafter(made, target, policy) for case, policy in policies.items()}
    drafters = {case: Oracle(each, lambda prompt: known[prompt.ids], 0.8) for case, each in heads.items()}
    yield from judge(kit, model, drafters)


def prediction(kit: Kit) -> Iterator[Finding]:
    """A target of latent attention with layers that predict its next tokens."""
    with tempfile.TemporaryDirectory() as folder:
        save_with_mtp("deepseek_v3", Path(folder))
        stock = AutoModelForCausalLM.from_pretrained(folder)
        prompts = [Prompt((5, 9, 3, 17, 9, 3, 17, 4)), Prompt((30, 2, 11, 8, 40))]
        expected = reference(kit, stock, [{"input_ids": torch.tensor([prompt.ids])} for prompt in prompts], NEW)
        target = Target(AutoModelForCausalLM.from_pretrained(folder).to(kit.device))
        drafters = {"plain": None, "mtp": HeadDrafter(load_mtp(target), target, Chain(3))}
        yield from judge(kit, (target, prompts, expected), drafters)
