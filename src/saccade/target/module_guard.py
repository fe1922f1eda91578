"""Noticing that a model is no longer built of the parts that something was made from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module


class ModuleGuard:
    """What a model's decoder and head are built of, to be compared with at every forward.

    Args:
        model: the whole model.
        run: its modules whose work is done elsewhere, with all that is in them; and so is the work of what they
            are in, of which other parts (a vision tower) may change.
        places: parameters of these that must not get other memory, either.
    """

    def __init__(self, model: nn.Module, run: Sequence[nn.Module], places: Iterable[Tensor]) -> None:
        inside = {m for root in run for m in root.modules()}
        around = {m for m in model.modules() if any(root in set(m.modules()) for root in run)}
        modules = [*inside, *(around - inside)]
        self._places = [(t, t.data_ptr()) for t in places]
        # Dictionaries of the modules themselves: reading them costs a tenth of going through the modules.
        self._hooks: list[dict[Any, Any]] = [
            h for m in modules for h in (m._forward_hooks, m._forward_pre_hooks)
        ]
        # Those of all modules of the process, which would see what is run in their place no more than the others.
        self._hooks += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
        self._own = [m.__dict__ for m in modules]
        children = [
            (m._modules, n, c) for m in modules for n, c in m._modules.items() if c in inside | around
        ]
        weights = [(m._parameters, n, p) for m in inside for n, p in m._parameters.items()]
        self._parts: list[tuple[dict[str, Any], str, Any]] = [*children, *weights]
        self._lists = [(m._modules, len(m)) for m in inside if isinstance(m, nn.ModuleList)]

    @property
    def is_current(self) -> bool:
        """Whether no part has been replaced or added, cast or moved, hooked, or given a forward of its own."""
        return (
            not any(self._hooks)
            and all(t.data_ptr() == place for t, place in self._places)
            and all(parts.get(name) is part for parts, name, part in self._parts)
            and all(len(layers) == count for layers, count in self._lists)
            and not any("forward" in own for own in self._own)
        )
