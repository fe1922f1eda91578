"""A pretend accelerator on the CPU, for what a machine without a GPU would never notice.

The torch device ``pretend`` holds CPU tensors out of the reach of Python. Every operation on them runs on the CPU and
gives what the CPU gives, but under the rules of an accelerator:

- A CPU tensor next to one of the device is refused (`MixedDevices`), but for 0-dim ones and, as with CUDA, integers
  that index, whose upload counts as a wait.
- What the host would have to wait for is counted as a wait: a copy to the host, ``tolist``, ``item``, ``bool``,
  ``nonzero`` and all that is built on it; not a ``non_blocking`` copy, nor an event after another wait.
- An upload is *sent* with ``non_blocking=True`` from pinned memory (only ``pin_memory`` makes such), else *blocking*.
- Whatever writes a tensor there is a launch; views and bare allocations are free. What CUDA has one kernel for is one
  launch here, too: a norm of `F.rms_norm`, and attention where it is given what the kernels take (`_attention`). Else
  one launch here may be several kernels there: launches are for comparing steps with one another, not with a profile.

    with PretendDevice() as device:
        model = model.to("pretend")
        with device.counting() as counts:
            step()

Tensors of the device stay usable after the block, uncounted. Inference mode, which knows nothing of tensors like
these, is `torch.no_grad` inside the block.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from saccade.target_model import fusing

NAME = "pretend"
_KERNELS = torch.library.Library("aten", "IMPL")
"""Of what torch calls below all modes."""

_CONVERSIONS = {"aten::_to_copy", "aten::to"}
_FREE = {
    "aten::detach",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::lift_fresh",
    "aten::_unsafe_view",
    "aten::_fused_sdp_choice",
}
_WAITING = {
    "aten::_local_scalar_dense": "item",
    "aten::equal": "equal",
    "aten::is_nonzero": "bool",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::_unique2": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique",
    "aten::repeat_interleave.Tensor": "repeat_interleave",
    "aten::bincount": "bincount",
}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class MixedDevices(RuntimeError):
    """A tensor on the CPU met one on the device."""


@dataclass
class Counts:
    """Work of the device while it was counted."""

    launches: Counter[str] = field(default_factory=Counter)  # operations that write a tensor, by name
    sent: Counter[str] = field(default_factory=Counter)  # uploads without a wait of the host, by place in the library
    blocking: Counter[str] = field(default_factory=Counter)  # uploads that it waits for, likewise
    waits: Counter[str] = field(default_factory=Counter)  # what else it waits for, by kind and place

    def __str__(self) -> str:
        parts = (self.launches, self.sent, self.blocking, self.waits)
        launches, sent, blocking, waits = (part.total() for part in parts)
        return f"{launches} launches, {sent} sent, {blocking} blocking uploads, {waits} waits"


class OnPretend(Tensor):
    """A tensor of the device; ``raw`` is where its numbers really are."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> OnPretend:
        made: OnPretend = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device(NAME, 0),
            requires_grad=raw.requires_grad,
        )
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"pretend({self.raw!r})"

    def tolist(self) -> Any:
        _count_wait("tolist")
        return self.raw.tolist()

    def numpy(self, *_: object, **__: object) -> Any:
        raise TypeError("A tensor of the pretend device cannot be turned to numpy; copy it to the CPU first.")

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    @property
    def is_cuda(self) -> bool:
        """True, so that what the library does for CUDA alone is done here, too."""
        return True

    @property
    def data(self) -> Tensor:
        return OnPretend(self.raw.detach())

    @data.setter
    def data(self, value: OnPretend) -> None:
        self.raw = value.raw


class _Pinned(Tensor):
    """A CPU tensor in memory from which the device can read by itself; what is computed from it is an ordinary one."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class _Operations(TorchDispatchMode):
    """Operations of a thread on tensors of the device."""

    def __enter__(self) -> Any:
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=NAME) goes through the CPU
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self._lifts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, _ = tree_flatten((args, kwargs))
        if any(isinstance(x, OnPretend) or _is_pretend(x) for x in flat):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


class PretendDevice(_Operations):
    """The device is there, and counted, while this is open, for this thread and those that begin meanwhile."""

    _open: ClassVar[list[PretendDevice]] = []
    _is_known: ClassVar[bool] = False

    def __init__(self) -> None:
        if not PretendDevice._is_known:
            _setup_privateuseone_for_python_backend(NAME)
            _KERNELS.impl("_local_scalar_dense", _item, "PrivateUse1")
            PretendDevice._is_known = True
        super().__init__()
        self.counts: Counts | None = None
        self._restore = ExitStack()

    def __enter__(self) -> PretendDevice:
        for owner, name, replacement in (
            (torch.inference_mode, "__enter__", _enter_no_grad),
            (torch.inference_mode, "__exit__", _leave_no_grad),
            (Tensor, "pin_memory", _pinned),
            (torch.cuda, "synchronize", lambda *_: _count_wait("synchronize")),
            (torch.cuda, "current_stream", _Stream),
            (Thread, "run", _run_thread),
            (F, "rms_norm", _norm),
            (F, "scaled_dot_product_attention", _attention),
            (fusing, "WEIGHTS", (*fusing.WEIGHTS, OnPretend)),  # a subclass of Tensor, as quantised weights are
        ):
            self._restore.enter_context(patch.object(owner, name, replacement))
        PretendDevice._open.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        PretendDevice._open.pop()
        self._restore.close()

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Count what happens until the context closes."""
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before


class _Stream:
    """What stands for a CUDA stream."""

    def __init__(self, device: object = None) -> None:
        """There is one of them."""

    def record_event(self) -> _Event:
        return _Event()


class _Event:
    """A point in the stream, which has been passed once the host has waited for anything after it."""

    def __init__(self) -> None:
        self._counts = _counts()
        self._waited = 0 if self._counts is None else self._counts.waits.total()

    def synchronize(self) -> None:
        if self._counts is not None and self._counts.waits.total() == self._waited:
            _count_wait("synchronize")


def _enter_no_grad(self: Any) -> None:
    self._inference_mode_context = torch.no_grad()
    self._inference_mode_context.__enter__()


def _leave_no_grad(self: Any, *error: Any) -> None:
    self._inference_mode_context.__exit__(*error)


_PLAIN_RUN, _PLAIN_NORM, _PLAIN_ATTENTION = Thread.run, F.rms_norm, F.scaled_dot_product_attention


def _item(self: OnPretend) -> Any:
    """A number that is read by itself, as by `torch.tensor` of tensors."""
    _count_wait("item")
    return self.raw.item()


def _run_thread(self: Thread) -> None:
    with _Operations():
        _PLAIN_RUN(self)


def _norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """`F.rms_norm`: one kernel on CUDA, which needs the rows in one piece and the weight's dtype."""
    known = isinstance(x, OnPretend) and isinstance(weight, OnPretend) and weight.dtype == x.dtype
    if not known or torch.is_grad_enabled():
        return _PLAIN_NORM(x, shape, weight, eps)
    _launch("rms_norm")
    if not x.is_contiguous():
        _launch("rms_norm: a copy")
    return OnPretend(_PLAIN_NORM(x.raw, shape, weight.raw, eps))  # type: ignore[attr-defined]


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`: one kernel on CUDA, which holds no scores of all queries and keys.

    The conditions are those of torch 2.11 to 2.13 for the flash kernel, which takes no mask, and for the
    memory-efficient one, which takes one of the queries' dtype whose rows begin at multiples of eight numbers, or
    copies it, and in older versions no heads in groups. Where neither fits, scores are computed, in several launches.
    """
    plain = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    tensors = (q, k, v)
    if not all(isinstance(x, OnPretend) for x in tensors) or torch.is_grad_enabled():
        return _PLAIN_ATTENTION(q, k, v, attn_mask, **plain)
    is_half, grouped = q.dtype.itemsize == 2, enable_gqa and q.shape[1] != k.shape[1]
    fits = all(x.stride(-1) == 1 and x.shape[-1] % (16 // q.dtype.itemsize) == 0 for x in tensors)
    fits &= not grouped or (is_half and attn_mask is None)  # the flash kernel takes groups
    fits &= attn_mask is None or attn_mask.dtype in (q.dtype, torch.bool)
    if not fits:
        return _PLAIN_ATTENTION(q, k, v, attn_mask, **plain)
    _launch("attention")
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        _launch("attention: a mask to add")
    if attn_mask is not None and any(stride % 8 for stride in attn_mask.stride()[:-1]):
        _launch("attention: padding of the mask")
    mask = None if attn_mask is None else attn_mask.raw  # type: ignore[attr-defined]
    return OnPretend(_PLAIN_ATTENTION(*(x.raw for x in tensors), mask, **plain))  # type: ignore[attr-defined]


def _launch(name: str) -> None:
    counts = _counts()
    if counts is not None:
        counts.launches[name] += 1


def _pinned(self: Tensor, *_: object, **__: object) -> Tensor:
    return self.detach().clone().as_subclass(_Pinned)


def _is_pretend(value: object) -> bool:
    return isinstance(value, torch.device) and value.type == NAME


def _counts() -> Counts | None:
    return PretendDevice._open[-1].counts if PretendDevice._open else None


def _count_wait(what: str) -> None:
    counts = _counts()
    if counts is not None:
        counts.waits[f"{what} at {_place()}"] += 1


def _place() -> str:
    """Line of the library on whose behalf `saccade.target_model.cache` sends."""
    frame = sys._getframe(1)
    place = "outside"
    while frame is not None and (place == "outside" or place.startswith("target_model/cache.py")):
        _, inside, name = frame.f_code.co_filename.rpartition("/saccade/")
        if inside:
            place = f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return place


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation with a tensor of the device, or one that makes one."""
    name = func._schema.name
    flat, spec = tree_flatten((args, kwargs))
    ours = [x for x in flat if isinstance(x, OnPretend)]
    host = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, OnPretend)]
    devices = [x for x in flat if isinstance(x, torch.device)]
    to_device = _is_pretend(devices[0]) if devices else bool(ours)
    is_copy = name in _CONVERSIONS or name == "aten::copy_"
    if not is_copy and ours:
        _refuse_mixed(name, host)
    if (counts := _counts()) is not None:
        _count(counts, func, args, kwargs, ours, host, to_device)

    def raw(value: Any) -> Any:
        if isinstance(value, OnPretend):
            return value.raw
        return torch.device("cpu") if _is_pretend(value) else value

    raw_args, raw_kwargs = tree_unflatten([raw(x) for x in flat], spec)
    if raw_kwargs.get("pin_memory"):
        raw_kwargs["pin_memory"] = False
    if name == "aten::histc":  # CUDA counts integers, too
        out = func(raw_args[0].float(), *raw_args[1:], **raw_kwargs).to(raw_args[0].dtype)
    else:
        out = func(*raw_args, **raw_kwargs)
    if is_copy and out is raw_args[0] and (ours and to_device):
        return flat[0]
    if "out" in kwargs:
        return kwargs["out"]
    if not func._schema.returns:
        return None
    if name.endswith("_") and not name.endswith("__"):
        return flat[0]
    if name in _CONVERSIONS and out is raw_args[0] and to_device:
        out = out.clone()  # what the host writes from now on does not reach the device
    return tree_map(lambda x: OnPretend(x) if isinstance(x, Tensor) and to_device else x, out)


def _refuse_mixed(name: str, host: list[Tensor]) -> None:
    wrong = [h for h in host if h.dim() > 0]
    if wrong and name in _INDEXING and all(h.dtype in (torch.int64, torch.bool, torch.uint8) for h in wrong):
        _count_wait("index from the host")
    elif wrong:
        shapes = ", ".join(str(list(h.shape)) for h in wrong)
        raise MixedDevices(f"{name} at {_place()} got CPU tensors of shape {shapes} next to tensors of {NAME}.")


def _count(
    counts: Counts, func: Any, args: Any, kwargs: Any, ours: list[Any], host: list[Any], to_device: bool
) -> None:
    name, full = func._schema.name, ".".join(filter(None, (func._schema.name, func._schema.overload_name)))
    is_mixed_copy = name == "aten::copy_" and bool(ours) and bool(host) and host[0].dim() > 0
    if name in _CONVERSIONS and ours and not to_device:
        if not kwargs.get("non_blocking"):
            _count_wait("copy to the host")
    elif is_mixed_copy and not isinstance(args[0], OnPretend):
        _count_wait("copy to the host")
    elif is_mixed_copy or (name in _CONVERSIONS and host and to_device):
        need_not_wait = kwargs.get("non_blocking") or (is_mixed_copy and (*args, False)[2])
        is_pinned = isinstance(host[0], _Pinned) and need_not_wait
        (counts.sent if is_pinned else counts.blocking)[_place()] += 1
    elif full in _WAITING or name in _WAITING:
        _count_wait(_WAITING.get(full) or _WAITING[name])
    else:
        indices = tree_flatten(args[1])[0] if name in _INDEXING else []
        if any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in indices):
            _count_wait("index by a mask")
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and name not in _FREE:
            counts.launches[full] += 1
