"""Detection of changes to the modules of a model that a lean decoder was built from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import contains, is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

_GET: Any = dict.get  # typed for a map over both lists


class ModuleGuard:
    """Snapshot of a model's decoder and head, compared with the model before every forward."""

    def __init__(self, model: nn.Module, replaced: Sequence[nn.Module], fused: Iterable[Tensor]) -> None:
        inside = {m for root in replaced for m in root.modules()}
        around = {m for m in model.modules() if any(root in set(m.modules()) for root in replaced)}
        modules = [*inside, *(around - inside)]
        # Dictionaries of the modules themselves, compared by C code: a tenth of the time of visiting the modules.
        self._hooks: list[dict[Any, Any]] = [h for m in modules for h in (m._forward_hooks, m._forward_pre_hooks)]
        # Global hooks would not see the replaced modules, either.
        self._hooks += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self._attributes = [m.__dict__ for m in modules]
        parts: list[tuple[dict[str, Any], str, Any]] = [
            (m._modules, name, child) for m in modules for name, child in m._modules.items() if child in inside | around
        ]
        parts += [(m._parameters, name, p) for m in inside for name, p in m._parameters.items()]
        self._owners, self._names, self._parts = ([part[i] for part in parts] for i in range(3))
        self._fused = list(fused)
        self._addresses = [t.data_ptr() for t in self._fused]
        self._lists = [m._modules for m in inside if isinstance(m, nn.ModuleList)]
        self._lengths = [len(children) for children in self._lists]

    @property
    def is_current(self) -> bool:
        """Whether no part was replaced, added, cast, moved, hooked, or given a forward of its own."""
        return (
            not any(self._hooks)
            and not any(map(contains, self._attributes, repeat("forward")))
            and all(map(is_, map(_GET, self._owners, self._names), self._parts))
            and [t.data_ptr() for t in self._fused] == self._addresses
            and list(map(len, self._lists)) == self._lengths
        )
