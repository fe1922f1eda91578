"""Random weights in the shapes of released models, made on the device, and a drafter that is right with a chance.

In `--small` runs they are tiny models of the families.

Sizes are those of the published config.json files of Qwen/Qwen2.5-VL-7B-Instruct, Qwen/Qwen2.5-VL-3B-Instruct and
Qwen/Qwen3.5-9B; nothing is downloaded. The walk: embeddings outweigh what the layers add to them, and the LM head is
that of the token that follows, so that a model's answer is known (`answer`) and no rounding turns it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.device import ROOT
from benchmarks.device.kit import Kit
from families import FAMILIES, FIRST_WORD, LAST_WORD
from saccade.draft.drafter import Drafter
from saccade.draft.heads.head import Head, HeadConfig, build_head
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.tree import DraftTree

QWEN7, QWEN3, HYBRID = "Qwen2.5-VL-7B", "Qwen2.5-VL-3B", "Qwen3.5-9B"
_TINY = {QWEN7: "qwen2_5_vl", QWEN3: "qwen2_5_vl", HYBRID: "qwen3_5"}
_SIZES = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
_THREE: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
_ROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"}
_NINE = {
    "max_position_embeddings": 262144,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "rope_parameters": {**_ROPE, "rope_theta": 10000000, "partial_rotary_factor": 0.25},
}


def config_of(name: str) -> Any:
    """The configuration of a released model."""
    if name == HYBRID:
        vision = {"out_hidden_size": 4096, "patch_size": 16}
        return transformers.AutoConfig.for_model("qwen3_5", text_config=_NINE, vision_config=vision)
    values = json.loads((ROOT / "tests" / "shapes" / "qwen2.5-vl-7b" / "config.json").read_text(encoding="utf-8"))
    if name == QWEN3:
        values |= _THREE
        values["vision_config"] |= {"out_hidden_size": 2048}
    return transformers.AutoConfig.for_model(values.pop("model_type"), **values)


def span_of(kit: Kit, vocab: int) -> tuple[int, int]:
    """The first word's id, and the number of words."""
    return (FIRST_WORD, LAST_WORD + 1 - FIRST_WORD) if kit.small else (1000, min(vocab, 150_000) - 1000)


@cache
def model_of(kit: Kit, name: str) -> Any:
    """A model on the device whose answers are a walk through its words."""
    if kit.small:
        model = FAMILIES[_TINY[name]].model()
    else:
        config = config_of(name)
        with torch.device(kit.device):
            model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
        model.generation_config.eos_token_id = None
    _walk(kit, model)
    return model.to(kit.device).eval()


@torch.no_grad()
def _walk(kit: Kit, model: Any) -> None:
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    first, count = span_of(kit, len(head))
    embedding.normal_(0.0, 1.0)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            weight.mul_(0.01)
    if head.data_ptr() != embedding.data_ptr():  # else it repeats its last token, which suits a draft model's time
        head.zero_()
        words = torch.arange(count, device=head.device)
        head[first + (words + 1) % count] = embedding[first + words]


def answer(kit: Kit, vocab: int, prompt: Prompt, count: int) -> list[int]:
    """What the walk goes on with after a prompt."""
    first, words = span_of(kit, vocab)
    start = prompt.ids[-1] - first + 1
    return [first + place % words for place in range(start, start + count)]


def prompt_of(kit: Kit, vocab: int, length: int, seed: int = 0) -> Prompt:
    """Random words."""
    first, words = span_of(kit, vocab)
    ids = torch.randint(words, (length,), generator=torch.Generator().manual_seed(seed)) + first
    return Prompt(tuple(ids.tolist()))


@cache
def target_of(kit: Kit, name: str) -> Target:
    return Target(model_of(kit, name))


def head_of(kit: Kit, kind: str) -> Head:
    """A head of random weights for the 7B target."""
    target = target_of(kit, QWEN7)
    options: dict[str, Any] = {"dflash": {"mask_token": 5, "block": 9}, "eagle3": {}}.get(kind, {})
    config = HeadConfig.from_target(target, kind, **options)
    with nullcontext() if kit.small else torch.device(kit.device):
        return build_head(config).to(kit.device, target.dtype).eval()


Answer = Callable[[Prompt], Sequence[int]]  # what the target answers to a prompt, as far as it is known


class Oracle:
    """Another drafter, in whose trees the first path holds the target's own next tokens, each with a chance."""

    draws = False

    def __init__(self, inner: Drafter, answer: Answer, chance: float) -> None:
        self.inner, self.answer, self.chance = inner, answer, chance

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self, rows: int, target: Any) -> Any:
        return _OracleSession(self, self.inner.open(rows, target), rows)


class _OracleSession:
    """The other drafter's session, with tokens put in the place of its own."""

    def __init__(self, oracle: Oracle, inner: Any, rows: int) -> None:
        self._oracle, self._inner = oracle, inner
        self._answers: list[Sequence[int]] = [()] * rows
        self._emitted = [0] * rows
        self._random = Random(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, row: int, prompt: Prompt, *more: Any) -> Any:
        self._answers[row], self._emitted[row] = self._oracle.answer(prompt), 0
        return self._inner.load(row, prompt, *more)

    def load_together(self, rows: Sequence[int], prompts: Sequence[Prompt]) -> bool:
        return False

    def propose(self, rows: Sequence[int], new: Sequence[Sequence[int]], proposer: Any, limit: int) -> DraftTree:
        tree = self._inner.propose(rows, new, proposer, limit)
        for row, tokens in zip(rows, new, strict=True):
            self._emitted[row] += len(tokens)
        right = torch.full((len(rows), tree.max_depth + 1), -1)
        for place, row in enumerate(rows):
            coming = self._answers[row][self._emitted[row] : self._emitted[row] + tree.max_depth]
            hits = [token if self._random.random() < self._oracle.chance else -1 for token in coming]
            right[place, 1 : 1 + len(hits)] = torch.tensor(hits, dtype=torch.long)
        return replace(tree, tokens=_with_path(tree, right.to(tree.tokens.device)), q=None)


def _with_path(tree: DraftTree, right: Tensor) -> Tensor:
    """Tokens ``[B, N]`` with those of ``right`` ``[B, D + 1]`` along the path of first children, but for -1."""
    batch, count = tree.tokens.shape
    parents, depth, valid = (t.expand(batch, -1) for t in (tree.parents, tree.depth, tree.valid))
    order = torch.arange(count, device=right.device)
    # a node is the first child if no node before it has its parent; the root is nobody's child
    same = (parents[:, :, None] == parents[:, None, :]) & (order[None, :] < order[:, None]) & (order > 0)
    first = valid & ((order == 0) | ~same.any(2))
    on_path = first
    for _ in range(tree.max_depth):
        on_path = first & on_path.gather(1, parents)
    coming = right.gather(1, depth)
    return torch.where(on_path & (coming >= 0), coming, tree.tokens)
