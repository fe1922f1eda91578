"""Proof at load that an architecture outside the conformance suite can be verified on trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from saccade.draft.tree import TreeShape, ancestors_of
from saccade.errors import ModelError
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.context import Context
from saccade.target.families import ordinary_ids

PROMPT_LENGTH = 6
SHAPE = TreeShape.of([(0,), (1,), (0, 0), (0, 1), (1, 0)])
LEAVES = (3, 4, 5)
KEPT = (0, 2, 5)
"""Nodes of the second branch: keeping them moves cache entries."""
LAYER_TYPES = {"full_attention", "sliding_attention"}


@torch.inference_mode()
def self_check(target: Target) -> None:
    """Compare a small tree, and the token after an accepted path, with full forwards; nothing for tested families.

    Costs four forwards of a few tokens and changes nothing on the model.

    Raises:
        ModelError: the architecture gives other logits on a tree than on the paths of that tree.
    """
    if target.family.tested:
        return
    unlike = set(getattr(target.text_config, "layer_types", None) or ()) - LAYER_TYPES
    if unlike:
        raise _refusal(target, f"it has layers of type {', '.join(sorted(unlike))}")
    with _undisturbed(target):
        ids = ordinary_ids(target.config, target.vocab_size, PROMPT_LENGTH + len(SHAPE.paths) + 2)
        prompt, nodes, after = ids[:PROMPT_LENGTH], ids[PROMPT_LENGTH:-1], ids[-1]
        try:
            ours = _on_a_tree(target, prompt, nodes, after)
            theirs = _path_by_path(target, prompt, nodes, after)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever an unknown architecture trips over is a refusal, not a crash
            raise _refusal(target, f"its forward failed ({type(error).__name__}: {error})") from error
    difference = (ours - theirs).float()
    spread = (theirs - theirs.mean(-1, keepdim=True)).float().norm(dim=-1)
    relative = float((difference.norm(dim=-1) / spread.clamp(min=1e-12)).max())
    if not relative <= tolerance(target.dtype):  # not <=, so that NaN is refused
        raise _refusal(
            target,
            f"logits differ from a plain forward by up to {float(difference.abs().max()):.3g} "
            f"({relative:.2%} of their spread; rounding explains {tolerance(target.dtype):.2%})",
        )


def tolerance(dtype: torch.dtype) -> float:
    """Largest difference of logits, relative to their spread over the vocabulary, that is called rounding.

    The square root of the dtype's resolution: 3e-4 in fp32, 3 % in fp16, 9 % in bf16. Sound architectures stay
    forty times below it (tests/target/test_selfcheck.py); one wrongly visible token shifts logits by 12 % and more.
    """
    return float(torch.finfo(dtype).eps ** 0.5)


def _on_a_tree(target: Target, prompt: Sequence[int], nodes: Sequence[int], after: int) -> Tensor:
    """``[1 + N + 1, V]`` logits after the prompt, after every node, and after one more token below `KEPT`."""
    context = Context(target, 1, len(prompt) + len(nodes) + 1)
    first = context.load(0, Prompt(tuple(prompt))).logits
    parents = torch.tensor([SHAPE.parents], device=target.device)
    depth = torch.tensor([[0, *map(len, SHAPE.paths)]], device=target.device)
    tree = context.forward(
        torch.tensor([nodes], device=target.device), ancestors_of(parents, SHAPE.max_depth), depth
    )
    context.keep([KEPT], [[nodes[i] for i in KEPT]])
    itself = torch.ones(1, 1, 1, dtype=torch.bool, device=target.device)
    last = context.forward(torch.tensor([[after]], device=target.device), itself, depth[:, :1])
    return torch.cat([first[None], tree[0], last[0]])


def _path_by_path(target: Target, prompt: Sequence[int], nodes: Sequence[int], after: int) -> Tensor:
    """The same logits from one forward over whole sequences, one per leaf, without a cache."""
    parents = SHAPE.parents
    rows = [[*prompt, nodes[0], nodes[parents[leaf]], nodes[leaf], after] for leaf in LEAVES]
    logits = target.model(input_ids=torch.tensor(rows, device=target.device), use_cache=False).logits
    start = len(prompt)
    found = [logits[0, start - 1], logits[0, start], logits[0, start + 1], logits[2, start + 1]]
    return torch.stack([*found, *logits[:, start + 2], logits[-1, start + 3]])


@contextmanager
def _undisturbed(target: Target) -> Iterator[None]:
    """Put back what a plain forward leaves on M-RoPE models: the rope deltas of the last prompt."""
    before: list[tuple[Any, Any]] = [
        (m, m.rope_deltas) for m in target.model.modules() if hasattr(m, "rope_deltas")
    ]
    for module, _ in before:
        module.rope_deltas = None
    try:
        yield
    finally:
        for module, deltas in before:
            module.rope_deltas = deltas


def _refusal(target: Target, why: str) -> ModelError:
    return ModelError(
        f"The architecture {target.family.model_type!r} cannot be verified on trees: {why}; use one of the tested "
        "families or plain generation."
    )
