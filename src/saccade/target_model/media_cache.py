"""Features of images and videos, cached by digest, and the time spent in the vision tower."""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from saccade.inputs.families import join, type_ids
from saccade.inputs.families.family import Medium
from saccade.target_model.adapter import Target
from saccade.target_model.forward import ending_at

MEDIA_BYTES = 256 * 2**20
"""Default size limit of a cache."""
TOWERS = ("vision_tower", "vision_model", "visual")
"""Attribute names of vision towers in models of transformers."""


class VisionTimer:
    """Seconds spent in a model's vision tower and projector while the context is open."""

    MODULES = (*TOWERS, "multi_modal_projector", "connector")

    def __init__(self, model: Any) -> None:
        base = getattr(model, "base_model", model)
        self._modules = [m for name in self.MODULES if isinstance(m := getattr(base, name, None), nn.Module)]
        self._handles: list[Any] = []
        self._started = 0.0
        self.seconds = 0.0

    def __enter__(self) -> VisionTimer:
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._start))
            self._handles.append(module.register_forward_hook(self._stop))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _start(self, module: nn.Module, *_: Any) -> None:
        _synchronize(module)
        self._started = time.perf_counter()

    def _stop(self, module: nn.Module, *_: Any) -> None:
        _synchronize(module)
        self.seconds += time.perf_counter() - self._started


def _synchronize(module: nn.Module) -> None:
    parameter = next(module.parameters(), None)
    if parameter is not None and parameter.is_cuda:
        torch.cuda.synchronize(parameter.device)


@dataclass(frozen=True, slots=True)
class MediaFeatures:
    """Decoder inputs of one image or video."""

    embeddings: Tensor  # `[n, d]` for the ids from the medium's first placeholder to its last
    # per first layers of the decoder `[n, d]` features added to the residual stream behind each (Qwen3-VL), zeros at
    # text tokens
    deepstack: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.embeddings, *self.deepstack))


class MediaCache:
    """Least-recently-used cache of features by model and digest.

    Where two models have the same vision tower (a draft VLM around its target's frozen one), it runs once for both.
    """

    def __init__(self, limit: int = MEDIA_BYTES) -> None:
        self.limit = limit  # bytes; 0 caches only the medium that was encoded last
        self.hits = self.misses = 0
        self.counted: Target | None = None  # the target; None: every model's look-ups count
        self.seconds = 0.0  # spent in vision towers and projectors so far
        self._entries: OrderedDict[tuple[Any, ...], tuple[Any, int]] = OrderedDict()
        self._sharing: list[Target] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the cached features."""
        return sum(size for _, size in self._entries.values())

    def share(self, models: Sequence[Target]) -> None:
        """Run the vision tower once per medium for models whose towers are equal."""
        self._sharing = list(models) if len(models) > 1 and _have_equal_towers(models) else []

    @torch.inference_mode()
    def features(self, model: Target, medium: Medium, ids: Sequence[int], again: bool = False) -> MediaFeatures:
        """Return a medium's features, encoding it if needed."""
        counts = not again and (self.counted is None or self.counted is model)
        key = ("features", id(model.model), medium.digest, tuple(ids))
        features: MediaFeatures | None = self._find(key)
        if features is not None:
            self.hits += counts
            return features
        self.misses += counts
        tower = tower_of(model.model) if any(m is model for m in self._sharing) else None
        tower_key = ("tower", medium.digest)
        outputs = None if tower is None else self._find(tower_key)
        with VisionTimer(model.model) as vision, _remembering(tower, outputs) as recorded:
            features = encode(model, medium, ids)
        if tower is not None and outputs is None:
            self._store(tower_key, recorded, sum(t.numel() * t.element_size() for t in _tensors(recorded)))
        self.seconds += vision.seconds
        self._store(key, features, features.nbytes)
        return features

    def has(self, model: Target, medium: Medium, ids: Sequence[int]) -> bool:
        """Whether a medium's features are cached."""
        return ("features", id(model.model), medium.digest, tuple(ids)) in self._entries

    def _find(self, key: tuple[Any, ...]) -> Any:
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def _store(self, key: tuple[Any, ...], value: Any, size: int) -> None:
        self._entries[key] = (value, size)
        total = self.nbytes
        while total > self.limit and len(self._entries) > 1:
            total -= self._entries.popitem(last=False)[1][1]


def encode(model: Target, medium: Medium, ids: Sequence[int]) -> MediaFeatures:
    """Run a stock model up to its decoder on one medium's placeholders."""
    row = torch.tensor([list(ids)], device=model.device)
    tensors = {**join(model.config, [medium]), **type_ids(model.config, ids)}
    inputs = {
        name: value.to(device=model.device, dtype=model.dtype if value.is_floating_point() else None)
        for name, value in tensors.items()
    }
    count = 3 if model.has_rope_index else 1
    places = torch.arange(len(ids), device=model.device).expand(count, 1, -1)
    inputs["position_ids"] = places if model.has_rope_index else places[0]
    with ending_at(model.decoder) as inputs_of_decoder:
        model.model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False, **inputs)
    embeddings = inputs_of_decoder["inputs_embeds"][0].to(model.device)
    return MediaFeatures(embeddings, tuple(_deepstack(inputs_of_decoder, embeddings)))


def _deepstack(inputs: dict[str, Any], like: Tensor) -> Iterator[Tensor]:
    """``[n, d]`` per layer of the features added at visual positions, zeros elsewhere."""
    for part in inputs.get("deepstack_visual_embeds") or ():
        dense = torch.zeros_like(like)
        dense[inputs["visual_pos_masks"][0].to(like.device)] = part.to(like)
        yield dense


def tower_of(model: Any) -> nn.Module | None:
    """Return a model's vision tower; None without one of a known name."""
    base = getattr(model, "base_model", model)
    return next((m for name in TOWERS if isinstance(m := getattr(base, name, None), nn.Module)), None)


_COMPARED: WeakKeyDictionary[nn.Module, tuple[nn.Module, bool]] = WeakKeyDictionary()


def _have_equal_towers(models: Sequence[Target]) -> bool:
    """Whether all models have equal towers; compared once, weight by weight."""
    first, *others = (tower_of(m.model) for m in models)
    if first is None or any(m.dtype != models[0].dtype or m.device != models[0].device for m in models):
        return False
    return all(other is not None and _equal(first, other) for other in others)


def _equal(first: nn.Module, second: nn.Module) -> bool:
    known = _COMPARED.get(first)
    if known is None or known[0] is not second:
        ours, theirs = first.state_dict(), second.state_dict()
        alike = type(first) is type(second) and ours.keys() == theirs.keys()
        alike = alike and all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
        _COMPARED[first] = known = (second, alike)
    return known[1]


@contextmanager
def _remembering(tower: nn.Module | None, outputs: Sequence[Any] | None) -> Iterator[list[Any]]:
    """Record a tower's outputs, call by call, or return recorded ones without running it."""
    recorded: list[Any] = []
    if tower is None:
        yield recorded
        return
    own, forward = tower.__dict__.get("forward"), tower.forward
    remaining = iter(outputs or ())

    def run(*args: Any, **kwargs: Any) -> Any:
        recorded.append(forward(*args, **kwargs) if outputs is None else next(remaining))
        return _copied(recorded[-1])

    tower.forward = run
    try:
        yield recorded
    finally:
        if own is None:
            del tower.forward
        else:
            tower.forward = own


def _copied(output: Any) -> Any:
    """Copy a tower's output, which its caller may change."""
    return type(output)(**output) if isinstance(output, ModelOutput) else copy.copy(output)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
