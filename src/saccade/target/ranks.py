"""Processes that share one target: its weights are split over them, and all follow the first one's decisions.

Every process (*rank*) runs the same program. Matrix products of the target are shared by transformers' tensor
parallelism; drafters, heads and vision towers are whole in every process. What follows from times, free memory, seeds
or a drafter's rounding could differ, and a rank that runs another forward than the others would wait for ever. So rank
0 hands out draft trees, verdicts, draft lengths, seeds and memory limits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from saccade.errors import ModelError
from saccade.tree import DraftTree

TENSOR_PARALLEL = "tp"
"""Value of device_map that splits a target over the processes started by `torchrun`."""
_HEADER = 64
"""Integers of a message's first part: its numbers, and the shapes of its tensors."""


class Ranks:
    """The processes that a target's weights are split over."""

    def __init__(self, mesh: Any, device: torch.device, gathered: bool = False) -> None:
        self._group, self._device = mesh.get_group(), device
        self._leader = distributed.get_global_rank(self._group, 0)
        self.rank: int = distributed.get_rank(self._group)  # of this process, from 0
        self.count: int = distributed.get_world_size(self._group)  # of processes
        self.shares = 1 if gathered else self.count  # parts that a cache entry is split into

    @classmethod
    def of(cls, model: Any) -> Ranks | None:
        """Return the ranks of a model with split weights; None for a whole one."""
        split = next((p for p in model.parameters() if hasattr(p, "device_mesh")), None)
        if split is None:
            return None
        gathered = any(hasattr(module, "unshard") for module in model.modules())
        return cls(split.device_mesh, split.to_local().device, gathered)

    def numbers(self, values: Sequence[int]) -> list[int]:
        """Return rank 0's integers, of which all ranks have equally many."""
        sent = self._send(torch.tensor(values, dtype=torch.long, device=self._device))
        return list(values) if self.rank == 0 else [int(v) for v in sent.tolist()]

    def tensors(self, numbers: Sequence[int], parts: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
        """Return rank 0's few integers and its tensors of integers or booleans, whose shapes may be other than here."""
        shapes = [(part.dim(), *part.shape) for part in parts]
        header = [*numbers, *(n for shape in shapes for n in shape)]
        known = iter(self.numbers(header + [0] * (_HEADER - len(header))))
        numbers = [next(known) for _ in numbers]
        sizes = [tuple(next(known) for _ in range(next(known))) for _ in parts]
        counts = [torch.Size(size).numel() for size in sizes]
        if self.rank == 0:
            joint = torch.cat([part.flatten().long() for part in parts]).to(self._device)
        else:
            joint = torch.empty(sum(counts), dtype=torch.long, device=self._device)
        given = zip(self._send(joint).split(counts), sizes, parts, strict=True)
        return numbers, [new.view(size).to(like.device, like.dtype) for new, size, like in given]

    def tree(self, tree: DraftTree) -> DraftTree:
        """Return rank 0's tree.

        Other ranks retain their own ``q`` where it fits: rank 0's verdict, the only one that counts, needs its own.
        """
        bounds, found = self.tensors(
            [tree.max_depth, tree.max_children],
            [tree.tokens, tree.parents, tree.depth, tree.ancestors, tree.valid],
        )
        tokens, parents, depth, ancestors, valid = found
        q = tree.q if tree.tokens.shape == tokens.shape else None
        return replace(
            tree,
            tokens=tokens,
            parents=parents,
            depth=depth,
            ancestors=ancestors,
            valid=valid,
            max_depth=bounds[0],
            max_children=bounds[1],
            q=q,
        )

    def _send(self, values: Tensor) -> Tensor:
        distributed.broadcast(values, self._leader, group=self._group)
        return values


def processes() -> int | None:
    """Number of processes that `torchrun` started, or a process group has; None outside of both."""
    if not distributed.is_available():
        return None
    if distributed.is_initialized():
        return distributed.get_world_size()
    needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in needed) else None


def check_split(config: Any) -> None:
    """Check without weights that a model can be split over the processes of this run."""
    count = processes()
    if count is None:
        raise ModelError(
            f"The device {TENSOR_PARALLEL!r} splits the target over processes, and this is a single one; start the "
            "command with `torchrun --nproc-per-node 2 --no-python saccade ...`, or a program with `torchrun "
            "--nproc-per-node 2 program.py`."
        )
    text = config.get_text_config(decoder=True)
    if not text.base_model_tp_plan:
        raise ModelError(
            f"transformers has no plan for splitting the architecture {config.model_type!r}; spread it over the "
            "devices of one process instead (device auto), or give a model of another family."
        )
    heads: Iterable[tuple[str, int]] = (
        ("attention heads", text.num_attention_heads),
        ("key-value heads", getattr(text, "num_key_value_heads", None) or text.num_attention_heads),
    )
    for what, number in heads:
        if number % count:
            raise ModelError(
                f"The target has {number} {what}, which {count} processes cannot share evenly; start a number of "
                f"processes that divides {number}."
            )
