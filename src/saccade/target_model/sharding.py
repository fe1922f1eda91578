"""A target divided among processes, in two ways: its layers' weights for training, or its matrix products for decoding.

Sharded by FSDP2, every process runs sequences of its own, and each layer is gathered whole while it runs. Embeddings,
LM head, norms and the vision tower stay whole: training reads the first two outside of forwards, and text alone skips
the last. So every forward gathers all layers in order, and a process that has no forward left joins in the gathering of
the others (`Shards.attend`).

In tensor parallelism every process (*rank*) runs the same program, and all follow the first one's decisions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from saccade.errors import ModelError
from saccade.target_model.traits import of_layer
from saccade.tree import DraftTree

SHARDED = "fsdp"  # value of device_map that shards a target's decoder layers over the processes started by `torchrun`
TENSOR_PARALLEL = "tp"  # value of device_map that splits a target over the processes started by `torchrun`
HOLDER = "_saccade_shards"  # attribute of a sharded decoder with its `Shards`


class Shards:
    """The processes among which a decoder's layers are divided."""

    def __init__(self, decoder: Any, device: torch.device) -> None:
        self._layers, self._device = decoder.layers, device
        self.count: int = distributed.get_world_size()  # of processes

        def announce(*_: Any) -> None:
            self._num_running(1)

        decoder.register_forward_pre_hook(announce)

    def attend(self) -> None:
        """Join in the other processes' forwards until none of them has any left, and all have come here."""
        while self._num_running(0):
            _gather(self._layers)

    def _num_running(self, here: int) -> int:
        """Number of processes whose decoder runs now."""
        running = torch.tensor(here, device=self._device)
        distributed.all_reduce(running)
        return int(running)


def check_sharding(config: Any) -> None:
    """Check without weights that a model can be sharded over the processes of this run."""
    if processes() is None:
        raise ModelError(
            f"The device {SHARDED!r} divides the target among processes, and this is a single one; start the command "
            "with `torchrun --nproc-per-node 2 --no-python saccade train ...`."
        )
    text = config.get_text_config(decoder=True)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"The target is quantised, which the device {SHARDED!r} does not divide; leave --device out, or give the "
            "checkpoint that is not quantised."
        )
    if getattr(text, "cross_attention_layers", None):
        raise ModelError(
            f"Text without images skips layers of a {config.model_type} model, so processes cannot gather them "
            f"together; leave the device {SHARDED!r} out."
        )


def check_processes(device_map: Any, config: Any) -> None:
    """Check without weights that a device_map among processes can divide the model; others are not checked."""
    if device_map == TENSOR_PARALLEL:
        check_split(config)
    if device_map == SHARDED:
        check_sharding(config)


def begin_processes() -> torch.device:
    """Connect the processes that `torchrun` started, if they are not yet, and return this one's device."""
    if not torch.cuda.is_available():
        if not distributed.is_initialized():
            distributed.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if not distributed.is_initialized():
        distributed.init_process_group("nccl", device_id=device)
    return device


def sharded(load: Callable[[], Any]) -> Any:
    """Load a model, process by process to save memory, and divide its decoder layers among all of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = begin_processes()
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    model: Any = None
    turns = torch.tensor(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), device=device)
    distributed.all_reduce(turns, distributed.ReduceOp.MAX)
    for turn in range(int(turns)):
        if turn == int(os.environ.get("LOCAL_RANK", "0")):
            model = load().requires_grad_(False)
            for layer in model.get_decoder().layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            model.to(device)
        distributed.barrier()
    decoder = model.get_decoder()
    _gather(decoder.layers)  # memory of whole layers must not be made in inference mode
    setattr(decoder, HOLDER, Shards(decoder, device))
    return model


def _gather(layers: Iterable[Any]) -> None:
    for layer in layers:
        layer.unshard()
        layer.reshard()


def whole(weight: Tensor) -> Tensor:
    """Return a weight with all its parts, which all processes must ask for together; other weights are returned."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def held(weight: Tensor) -> Tensor:
    """Return the part of a weight that this process holds."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


_HEADER = 64  # integers of a message's first part: its numbers, and the shapes of its tensors


class Ranks:
    """The processes that a target's weights are split over, which follow rank 0; `OneProcess` for a whole target."""

    is_split = True

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
        sent = torch.tensor(values, dtype=torch.long, device=self._device)
        distributed.broadcast(sent, self._leader, group=self._group)
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
        distributed.broadcast(joint, self._leader, group=self._group)
        received = zip(joint.split(counts), sizes, parts, strict=True)
        tensors = [new.view(size).to(like.device, like.dtype) for new, size, like in received]
        return numbers, tensors

    def tree(self, tree: DraftTree) -> DraftTree:
        """Return rank 0's tree; its ``q`` stays there, where the only verdict that counts is found."""
        parts = tree.tokens, tree.parents, tree.depth, tree.ancestors, tree.valid
        bounds, (tokens, parents, depth, ancestors, valid) = self.tensors([tree.max_depth, tree.max_children], parts)
        q = tree.q if tree.tokens.shape == tokens.shape else None
        shape: dict[str, Any] = {"parents": parents, "depth": depth, "ancestors": ancestors, "valid": valid}
        return replace(tree, tokens=tokens, **shape, max_depth=bounds[0], max_children=bounds[1], q=q)


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
    every = range(text.num_hidden_layers)
    heads = {("attention heads", of_layer(text, "num_attention_heads", layer)) for layer in every}
    heads |= {("key-value heads", of_layer(text, "num_key_value_heads", layer)) for layer in every}
    for what, number in sorted(heads, key=str):
        if number and number % count:
            raise ModelError(
                f"The target has {number} {what}, which {count} processes cannot share evenly; start a number of "
                f"processes that divides {number}."
            )
