"""Check at load that an architecture outside the conformance suite can be verified on trees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from saccade.errors import ModelError
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.target_model.recurrent import RECURRENT_TYPES, has_tree_form
from saccade.target_model.stock import replaced
from saccade.target_model.traits import LAYER_TYPES, WINDOWS, Thresholds, layer_types, ordinary_ids
from saccade.tree import TreeShape, ancestors_of

PROMPT_LENGTH = 6
LONGEST = 320  # longest window that is checked with a prompt longer than it
WINDOW = 4  # replacement of longer windows during the check; masks follow from the configuration
SHAPE = TreeShape.of([(0,), (1,), (0, 0), (0, 1), (1, 0)])
LEAVES = (3, 4, 5)
ACCEPTED = (0, 2, 5)  # nodes of the second branch, whose commit moves cache entries


@torch.inference_mode()
def self_check(target: Target) -> None:
    """Compare a small tree, on both sides of every window and position threshold, with plain decoding."""
    if target.traits.tested:
        return
    types = layer_types(target.text_config)
    unlike = set(types) - LAYER_TYPES
    for kind, layer in zip(types, target.layers, strict=False):  # no kinds are named where layers are alike
        if kind in RECURRENT_TYPES and not has_tree_form(layer):
            unlike.add(kind)
    if unlike:
        raise _refusal(target, f"it has layers of type {', '.join(sorted(unlike))}")
    thresholds = Thresholds.of(target.text_config)
    if thresholds.unknown:
        named = ", ".join(f"{name}={value}" for name, value in thresholds.unknown.items())
        raise _refusal(target, f"what it does with sequences longer than {named} is not known")
    windows = thresholds.windows if target.traits.masks.reach is not None else ()
    near = [n for n in windows if n <= LONGEST]
    lengths = {PROMPT_LENGTH}
    for window in near:
        lengths |= {window - 2, window + 2}
    for length in sorted(lengths - {0, 1}):
        _compare(target, length, 0)
    limits = target.traits.limits
    last = limits.longrope_threshold or limits.context  # positions of new tokens are clamped to it
    for start in (n for n in thresholds.positions if last is None or n + SHAPE.max_depth + 1 < last):
        # A window counts tokens in some architectures, positions in others.
        with _window(target, start + LONGEST) if windows else nullcontext():
            _compare(target, PROMPT_LENGTH, start)
    if len(near) < len(windows):
        with _window(target, WINDOW):
            _compare(target, PROMPT_LENGTH, 0)


def _compare(target: Target, length: int, start: int) -> None:
    """Compare after a prompt of ``length`` tokens, with all new tokens around position ``start``."""
    ids = ordinary_ids(target.config, target.vocab_size, length + len(SHAPE.paths) + 2)
    parts = ids[:length], ids[length:-1], ids[-1], max(start - length - 1, 0)
    deltas = [(m, "rope_deltas", None) for m in target.model.modules() if hasattr(m, "rope_deltas")]
    try:
        with replaced(deltas):  # which a plain forward leaves on M-RoPE models
            ours, theirs = _on_a_tree(target, *parts), _path_by_path(target, *parts)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any failure of an unknown architecture is a refusal
        raise _refusal(target, f"its forward failed ({type(error).__name__}: {error})") from error
    difference = (ours - theirs).float()
    centred = theirs - theirs.mean(-1, keepdim=True)
    spread = centred.float().norm(dim=-1).clamp(min=1e-12)
    relative = float((difference.norm(dim=-1) / spread).max())
    rounding = torch.finfo(target.dtype).eps ** 0.5
    if not relative <= rounding:  # not >, so that NaN is refused
        raise _refusal(
            target,
            f"logits differ from plain decoding by up to {float(difference.abs().max()):.3g} "
            f"({relative:.2%} of their spread; rounding explains {rounding:.2%})",
        )


def _on_a_tree(target: Target, prompt: Sequence[int], nodes: Sequence[int], after: int, gap: int) -> Tensor:
    """``[1 + N + 1, V]`` logits after the prompt, after every node, and after one more token below `ACCEPTED`."""
    context = Context(target, 1)
    context.cache.reserve(0, len(prompt) + len(nodes) + 1)
    first = context.load(0, Prompt(tuple(prompt))).logits
    assert first is not None
    depths = [0, *map(len, SHAPE.paths)]
    tokens, parents, depth = torch.tensor([nodes, SHAPE.parents, depths], device=target.device)[:, None]
    depth = depth + gap
    tree = context.forward([0], tokens, ancestors_of(parents, SHAPE.max_depth), depth)
    context.commit([0], [ACCEPTED], [[nodes[i] for i in ACCEPTED]])
    one = torch.tensor([[after]], device=target.device)
    last = context.forward([0], one, None, depth[:, :1])
    return torch.cat([first[None], tree.logits[0], last.logits[0]])


def _path_by_path(target: Target, prompt: Sequence[int], nodes: Sequence[int], after: int, gap: int) -> Tensor:
    """Return the same logits as plain decoding computes them: token by token, one sequence per leaf."""
    parents, start = SHAPE.parents, len(prompt)
    rows = [[*prompt, nodes[0], nodes[parents[leaf]], nodes[leaf], after] for leaf in LEAVES]
    tokens = torch.tensor(rows, device=target.device)
    places = torch.arange(tokens.shape[1], device=target.device)
    places = (places + gap * (places >= start)).expand_as(tokens)
    every, logits = torch.ones_like(tokens), []
    cache = DynamicCache(config=target.text_config)  # as `generate` gives; some models make none of their own
    for first, stop in pairwise((0, *range(start, tokens.shape[1] + 1))):
        # Without a mask, transformers reads gaps as borders of packed sequences.
        more = {"position_ids": places[:, first:stop], "attention_mask": every[:, :stop]} if gap else {}
        output = target.model(input_ids=tokens[:, first:stop], past_key_values=cache, use_cache=True, **more)
        logits.append(output.logits[:, -1])
    roots, parents_of_leaves, leaves, last = logits[1:]
    shared = [logits[0][0], roots[0], parents_of_leaves[0], parents_of_leaves[2]]
    return torch.stack([*shared, *leaves, last[-1]])


def _window(target: Target, length: int) -> AbstractContextManager[None]:
    """Replace the windows of the configuration, modules and masks while the context is open."""
    masks = target.traits.masks
    if masks.window is not None:
        masks = replace(masks, window=length)
    if masks.chunk is not None:
        masks = replace(masks, chunk=length)
    changes: list[tuple[Any, str, Any]] = [(target, "traits", replace(target.traits, masks=masks))]
    for owner in (target.text_config, *target.decoder.modules()):
        for name in WINDOWS:
            if isinstance(getattr(owner, name, None), int):
                changes.append((owner, name, length))
    return replaced(changes)


def _refusal(target: Target, why: str) -> ModelError:
    traits = target.traits
    name = repr(traits.model_type)
    if traits.text_type not in (traits.model_type, f"{traits.model_type}_text"):
        name += f" around {traits.text_type!r}"
    return ModelError(
        f"The architecture {name} cannot be verified on trees: {why}; use one of the tested "
        "families or plain generation."
    )


@dataclass(frozen=True, slots=True)
class LogitMap:
    """``factor * x``, then ``cap * tanh(x / cap)``."""

    factor: float = 1.0  # of every output (Cohere's `logit_scale`, Granite's `1 / logits_scaling`)
    cap: float = math.inf  # largest size of a logit (Gemma's `final_logit_softcapping`), infinite without one

    def __call__(self, outputs: Tensor) -> Tensor:
        """Return logits of the LM head's outputs, of the same shape and dtype."""
        logits = outputs if self.factor == 1 else outputs * self.factor
        return logits if math.isinf(self.cap) else (logits / self.cap).tanh() * self.cap


_SMALL, _LARGE = 1e-2, 6e4
"""Sizes of the probe: the small ones show the factor, the large ones the cap; within float16's range."""


def logit_map(target: Target) -> LogitMap:
    """Measure a target's map in a forward whose LM head returns known numbers; the identity where none fits."""
    if target.is_lean:
        return LogitMap()
    ids = ordinary_ids(target.config, target.vocab_size, 4)
    probes: list[Tensor] = []

    def replace(_: Any, __: Any, output: Tensor) -> Tensor:
        count = output.shape[-1]
        sizes = torch.logspace(math.log10(_SMALL), math.log10(_LARGE), count, device=output.device)
        signs = 1 - 2 * (torch.arange(count, device=output.device) % 2)
        probes.append((sizes * signs).to(output.dtype))
        return probes[-1].expand_as(output).clone()

    handle = target.output_embeddings.register_forward_hook(replace)
    try:
        logits = Context(target, 1).load(0, Prompt(tuple(ids))).logits
    finally:
        handle.remove()
    if not probes or logits is None or probes[-1].shape[-1:] != logits.shape:
        return LogitMap()
    rounding = max(1e-4, 4 * torch.finfo(logits.dtype).eps)
    raw, logits = probes[-1].to(logits.device).double(), logits.double()
    factor = float((logits / raw)[raw.abs() < 10 * _SMALL].mean())
    largest = float(logits.abs().max())
    fitted = LogitMap(
        1.0 if abs(factor - 1) <= rounding else factor,
        largest if largest < 0.5 * factor * _LARGE else math.inf,
    )
    fits = factor > 0 and torch.allclose(fitted(raw), logits, rtol=rounding, atol=0.0)
    return fitted if fits else LogitMap()
