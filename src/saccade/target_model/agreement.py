"""Comparison of forwards: with the model's own modules, within rounding, and bit for bit in exact mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.target_model.token_blocks import TokenBlock
from saccade.target_model.traits import Thresholds, ordinary_ids
from saccade.tree import ancestors_of

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05, torch.int8: 0.4}
"""Largest difference of a logit attributed to rounding, in standard deviations of the logits: a few hundred
roundings of each dtype. A structural difference moves logits by about one standard deviation."""
_PROMPT, _DEPTH, _WIDTH = 9, 5, 3  # prompt tokens, levels and tokens per level of the trees that are tried at load


def gives_stock_logits(target: Any) -> bool:
    """Whether a `Target`'s lean decoder and stock modules agree on a small tree, and far away (`Thresholds`)."""
    limits = target.traits.limits
    far = Thresholds.of(target.text_config).probe_positions(limits.longrope_threshold or limits.context)
    ids = ordinary_ids(target.config, target.vocab_size, 11 + len(far))
    cache = target.new_cache(1)
    cache.reserve(0, len(ids))
    prompt = torch.tensor([ids[:7]], device=target.device)
    target.forward(cache, [TokenBlock([0], prompt, logits_from=6)])
    cache.commit([0], [range(7)])
    parents = [0, 0, 0, 1, *(0 for _ in far)]
    depths = [0, 1, 1, 2, *(max(n - 7, 1) for n in far)]
    tokens, above, depth = torch.tensor([ids[7:], parents, depths], device=target.device)[:, None]
    positions = limits.clamp_positions(depth + 7, [7])[None]  # beyond those that so many tokens would have
    tree = TokenBlock([0], tokens, ancestors_of(above, 2), depth, positions=positions)
    with target.stock():
        stock = target.forward(cache, [tree])[0].logits.float()
    cache.drop([0])
    ours = target.forward(cache, [tree])[0].logits.float()
    return are_close(ours, stock, torch.int8 if target.executor.rounds else target.dtype)


def are_close(ours: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether rounding in a dtype explains what logits ``[..., V]`` differ by."""
    error = (ours - expected).abs().amax(-1) / expected.std(-1)
    return bool((error <= TOLERANCE.get(dtype, 0.0)).all())  # not >, so that NaN fails


@torch.inference_mode()
def is_exact(target: Any) -> bool:
    """Whether a tree's path gives the bits that its tokens give one by one, after a prompt in other chunks."""
    ids = ordinary_ids(target.config, target.vocab_size, _PROMPT + _DEPTH * _WIDTH)
    prompt, nodes = ids[:_PROMPT], ids[_PROMPT:]
    path = [level * _WIDTH + level % _WIDTH for level in range(_DEPTH)]  # a root, and one of each level's tokens
    parents = [path[max(node // _WIDTH - 1, 0)] for node in range(len(nodes))]
    cache = target.new_cache(2)
    for row in range(2):
        cache.reserve(row, len(ids))

    def run(row: int, tokens: list[int], path: Sequence[int], *tree: Any) -> Tensor:
        """Run tokens and commit a path, whose logits are returned."""
        block = TokenBlock([row], torch.tensor([tokens], device=target.device), *tree)
        logits: Tensor = target.forward(cache, [block])[0].logits[0]
        cache.commit([row], [path])
        return logits[list(path)]

    run(0, prompt, range(_PROMPT))
    above = ancestors_of(torch.tensor([parents], device=target.device), _DEPTH)
    depth = torch.tensor([[node // _WIDTH for node in range(len(nodes))]], device=target.device)
    drafted = run(0, nodes, path, above, depth)
    for part in (prompt[:4], prompt[4:]):
        run(1, part, range(len(part)))
    plain = torch.cat([run(1, [nodes[node]], [0]) for node in path])
    for ours, theirs in zip(cache.export(0), cache.export(1), strict=True):
        if not all(map(torch.equal, ours, theirs)):
            return False
    return torch.equal(drafted, plain)
