"""Graphs on the CPU: a forward's operations, recorded with their tensors and repeated on the same memory.

As with a graph on a GPU, a repetition sees new inputs only through the memory of the recorded ones: a number that the
host computed, a tensor that was made outside, and every shape stay as they were. A host that reads a tensor while it is
recorded is refused (`HostRead`), as a GPU refuses it. A graph holds no tensor that was made outside: nor does a record,
which finds out where nobody else does (`Freed`). A tensor that goes to or from a pretended device is refused, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import RLock, get_ident
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_READS = (
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::item",
)


class HostRead(RuntimeError):
    """The host read a tensor inside a recorded part."""


class Freed(RuntimeError):
    """A recorded part reads a tensor that nobody holds any more."""


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        self._inside: set[int] = set()  # memory of tensors that were made here
        self._views: list[Tensor] = []  # and views of others that were

    def _held(self, value: Any) -> Any:
        is_outside = isinstance(value, Tensor) and _memory(value) not in self._inside
        return weakref.ref(value) if is_outside else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in _READS:
            raise HostRead(f"{func._schema.name} inside a recorded part")
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if len({x.device for x in (*tensors, out) if isinstance(x, Tensor) and (x.dim() or x is out)}) > 1:
            raise HostRead(f"{func._schema.name} between host and device inside a recorded part")
        given = set(map(_memory, tensors))
        outputs = tree_leaves(out)
        is_new = [isinstance(x, Tensor) and _memory(x) not in given for x in outputs]
        made = [x.detach() if new else None for x, new in zip(outputs, is_new, strict=True)]  # or its shape may change
        held_args, held_kwargs = tree_map(self._held, (args, kwargs))
        self._inside |= {_memory(x) for x in made if x is not None}
        self._views += [x for x in outputs if isinstance(x, Tensor) and not any(x is each for each in tensors)]
        self.operations.append((func, held_args, held_kwargs, made))
        return out


def _alive(value: Any) -> Any:
    if not isinstance(value, weakref.ref):
        return value
    tensor = value()
    if tensor is None:
        raise Freed("a tensor that a recorded part reads is gone")
    return tensor


def _memory(tensor: Tensor) -> int:
    return 0 if tensor.layout is not torch.strided else tensor.untyped_storage().data_ptr()


_ONE = RLock()  # only one graph is captured at a time in a process, on a GPU, too
_PLAIN_TOLIST = Tensor.tolist


def _refused_in(thread: int) -> Callable[[Tensor], Any]:
    def tolist(self: Tensor) -> Any:
        if get_ident() == thread:
            raise HostRead("tolist inside a recorded part")
        return _PLAIN_TOLIST(self)

    return tolist


def record(function: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
    """Run a function and record it; of the form of `saccade.target_model.graphs.CAPTURES`."""
    recorder, outputs = _recorded(function)
    return lambda: _repeat(recorder), outputs


def _recorded(function: Callable[[], Any]) -> tuple[_Recorder, Any]:
    function()  # as CUDA needs it
    recorder = _Recorder()
    with _ONE, recorder, patch.object(Tensor, "tolist", _refused_in(get_ident())):
        return recorder, function()


def _repeat(recorder: _Recorder) -> None:
    for func, *arguments, made in recorder.operations:
        args, kwargs = tree_map(_alive, arguments)
        for old, new in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
            if old is not None:
                old.copy_(new)


class Overwriting:
    """The same in memory that all graphs use in turn: a replay leaves nothing of what others computed inside."""

    def __init__(self) -> None:
        self._made: list[Tensor] = []

    def record(self, function: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
        recorder, outputs = _recorded(function)
        self._made += [old for *_, made in recorder.operations for old in made if old is not None]

        def replay() -> None:
            for tensor in self._made:
                tensor.fill_(77 if tensor.is_floating_point() else 1)
            _repeat(recorder)

        return replay, outputs


def captured_on(device: Any) -> Callable[..., tuple[Callable[[], None], Any]]:
    """The same on a pretended device (`pretend_device`), where a replay is one launch."""

    def capture(function: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
        replay, outputs = record(function, pool)

        def once() -> None:
            with device.counting():  # and forgotten
                replay()
            if device.counts is not None:
                device.counts.launches["graph"] += 1

        return once, outputs

    return capture
