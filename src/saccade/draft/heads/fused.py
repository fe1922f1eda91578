"""Products of a head fused for drafting: layers with one input run as one product, packed for this CPU where it pays.

The weights of the layers become views of a joint one, as in the target's lean decoder, so that no memory is added and
saving, casting and training go on as before. Forwards over a cache of rows use the fused products; training does not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from saccade.target import lean
from saccade.target.linear import Linear, pack_where_faster


class Fusable(nn.Module):
    """A module whose layers can be fused."""

    def __init__(self) -> None:
        super().__init__()
        self.products: dict[str, Linear] = {}
        self._fused: list[tuple[Any, Tensor, int]] = []  # layers, their weights, and the addresses of those

    @abstractmethod
    def groups(self) -> Mapping[str, Sequence[Any]]:
        """Layers by name of their group; those of one group get the same input."""

    @property
    def is_current(self) -> bool:
        """Whether the layers and the places of their weights are those that were fused."""
        layers = [layer for group in self.groups().values() for layer in group]
        return len(layers) == len(self._fused) and all(
            layer is known and layer.weight is weight and weight.data_ptr() == place
            for layer, (known, weight, place) in zip(layers, self._fused, strict=True)
        )

    @torch.inference_mode(False)  # the weights may be trained later
    @torch.no_grad()
    def fuse(self) -> None:
        """Fuse the layers of every group anew."""
        groups = self.groups()
        layers = [layer for group in groups.values() for layer in group]
        fits = all(_is_plain(layer) for layer in layers) and len({layer.weight.dtype for layer in layers}) == 1
        self.products = {name: _fuse(group) for name, group in groups.items()} if fits else {}
        self._fused = [(layer, layer.weight, layer.weight.data_ptr()) for layer in layers] if fits else []

    def __getstate__(self) -> dict[str, Any]:
        """The state without fused products, which a copy makes of its own weights."""
        return {**self.__dict__, "products": {}, "_fused": []}


class FusedHead:
    """Fused modules of a head that drafts."""

    def __init__(self, head: nn.Module) -> None:
        self._modules = [module for module in head.modules() if isinstance(module, Fusable)]
        self.refresh()

    def refresh(self) -> None:
        """Fuse modules anew whose weights were replaced, and pack weights again that were changed in place."""
        changed = [module for module in self._modules if not module.is_current]
        for module in changed:
            module.fuse()
        if changed:
            pack_where_faster(product for module in changed for product in module.products.values())
        for module in self._modules:
            for product in module.products.values():
                product.refresh()


def _is_plain(layer: Any) -> bool:
    """Whether a layer is a product with weights that hold their values and nothing else, without hooks."""
    return (
        type(layer) is nn.Linear
        and all(type(parameter) in lean.WEIGHTS for parameter in layer.parameters())
        and not (layer._forward_hooks or layer._forward_pre_hooks)
    )


def _fuse(layers: Sequence[nn.Linear]) -> Linear:
    """Return the product of all layers, whose weights and biases become views of its own."""
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]  # of all or of none
    return Linear(lean.fuse_parameters(weights), lean.fuse_parameters(biases) if biases else None, weights)
