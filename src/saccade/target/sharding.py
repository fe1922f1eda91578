"""A target whose decoder layers are divided among processes by FSDP2; each layer is gathered whole while it runs.

Unlike in tensor parallelism (`saccade.target.ranks`), every process runs sequences of its own, for training.
Embeddings, LM head, norms and the vision tower stay whole: training reads the first two outside of forwards, and text
alone skips the last. So every forward gathers all layers in order, and a process that has no forward left joins in the
gathering of the others (`Shards.attend`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn

from saccade.errors import ModelError
from saccade.target.ranks import TENSOR_PARALLEL, check_split, processes

SHARDED = "fsdp"
"""Value of device_map that shards a target's decoder layers over the processes started by `torchrun`."""
_HOLDER = "_saccade_shards"


class Shards:
    """The processes among which a decoder's layers are divided."""

    def __init__(self, decoder: Any, device: torch.device) -> None:
        self._layers, self._device = decoder.layers, device
        self.count: int = distributed.get_world_size()  # of processes
        decoder.register_forward_pre_hook(self._announce)

    @classmethod
    def of(cls, decoder: Any) -> Shards | None:
        """Return the shards of a decoder that `sharded` returned; None for any other."""
        found: Shards | None = getattr(decoder, _HOLDER, None)
        return found

    def attend(self) -> None:
        """Join in the other processes' forwards until none of them has any left, and all have come here."""
        while self._running(0):
            for layer in self._layers:
                layer.unshard()
                layer.reshard()

    def _announce(self, *_: Any) -> None:
        self._running(1)

    def _running(self, own: int) -> int:
        """Number of processes whose decoder runs now."""
        flag = torch.tensor(own, device=self._device)
        distributed.all_reduce(flag)
        return int(flag)


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
    if isinstance(device_map, str) and device_map == TENSOR_PARALLEL:
        check_split(config)
    if isinstance(device_map, str) and device_map == SHARDED:
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
    """Load a model and divide its decoder layers among all processes.

    The processes of a machine take turns: each has the whole model in the machine's memory only while it takes its own
    parts.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = begin_processes()
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    model: Any = None
    for turn in range(_largest(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), device)):
        if turn == int(os.environ.get("LOCAL_RANK", "0")):
            model = load().requires_grad_(False)
            for layer in model.get_decoder().layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            model.to(device)
        distributed.barrier()
    decoder = model.get_decoder()
    for layer in decoder.layers:  # memory of whole layers must not be made in inference mode
        layer.unshard()
        layer.reshard()
    setattr(decoder, _HOLDER, Shards(decoder, device))
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether a model's decoder layers are divided by `sharded`."""
    return any(hasattr(module, _HOLDER) for module in model.modules())


def whole(weight: Tensor) -> Tensor:
    """Return a weight with all its parts, which all processes must ask for together; other weights are returned."""
    gather = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()


def held(weight: Tensor) -> Tensor:
    """Return the part of a weight that this process holds."""
    local = getattr(weight, "to_local", None)
    return weight if local is None else local()


def _largest(value: int, device: torch.device) -> int:
    largest = torch.tensor(value, device=device)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    return int(largest)
