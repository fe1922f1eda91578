"""Encoded images and videos, cached by digest, and the time spent in the vision tower."""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from saccade.inputs.padded import join, type_ids
from saccade.inputs.prompt import Medium

if TYPE_CHECKING:
    from saccade.target.adapter import Target


class VisionTimer:
    """Seconds spent in a model's vision tower and projector while the context is open."""

    TOWERS = ("vision_tower", "vision_model", "visual", "multi_modal_projector", "connector")

    def __init__(self, model: Any) -> None:
        base = getattr(model, "base_model", model)
        self._modules = [m for name in self.TOWERS if isinstance(m := getattr(base, name, None), nn.Module)]
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


MEDIA_BYTES = 256 * 2**20
"""What a cache keeps by default."""
TOWERS = ("vision_tower", "vision_model", "visual")
"""Names of vision towers in models of transformers."""


@dataclass(frozen=True, slots=True)
class MediaFeatures:
    """What a model makes of one image or video before its decoder.

    Attributes:
        embeddings: ``[n, d]`` for the ids from the medium's first placeholder to its last.
        added: per first layers of the decoder ``[n, d]`` what is added to the stream behind each, zeros where nothing
            is (Qwen3-VL's deepstack).
    """

    embeddings: Tensor
    added: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.embeddings, *self.added))


class MediaCache:
    """MediaFeatures by model and digest; those that were used least recently go first.

    Where two models have the same vision tower (a draft VLM around its target's frozen one), it runs once for both.

    Args:
        limit: bytes that are kept; 0 keeps nothing beyond the medium that was encoded last.

    Attributes:
        hits, misses: how often features were there, and were not.
        seconds: spent in vision towers and projectors so far.
    """

    def __init__(self, limit: int = MEDIA_BYTES) -> None:
        self.limit = limit
        self.hits = self.misses = 0
        self.seconds = 0.0
        self._kept: OrderedDict[tuple[Any, ...], tuple[Any, int]] = OrderedDict()
        self._sharing: list[Target] = []

    @property
    def nbytes(self) -> int:
        """Bytes kept now."""
        return sum(size for _, size in self._kept.values())

    def share(self, models: Sequence[Target]) -> None:
        """Let models with equal vision towers read every medium once."""
        self._sharing = list(models) if len(models) > 1 and _same_towers(models) else []

    @torch.inference_mode()
    def features(self, model: Target, medium: Medium, ids: Sequence[int]) -> MediaFeatures:
        """A medium's features.

        Args:
            ids: of the prompt, from its first placeholder to its last.
        """
        key = ("features", id(model.model), medium.digest, tuple(ids))
        found = self._find(key)
        if found is not None:
            self.hits += 1
            return found  # type: ignore[no-any-return]
        self.misses += 1
        tower = tower_of(model.model) if any(m is model for m in self._sharing) else None
        seen = ("tower", medium.digest)
        with VisionTimer(model.model) as vision:
            if tower is None:
                features = encode(model, medium, ids)
            elif (outputs := self._find(seen)) is not None:
                with _answering(tower, outputs):
                    features = encode(model, medium, ids)
            else:
                with _listening(tower) as outputs:
                    features = encode(model, medium, ids)
                self._keep(seen, outputs, sum(t.numel() * t.element_size() for t in _tensors(outputs)))
        self.seconds += vision.seconds
        self._keep(key, features, features.nbytes)
        return features

    def has(self, model: Target, medium: Medium, ids: Sequence[int]) -> bool:
        """Whether a medium's features are there."""
        return ("features", id(model.model), medium.digest, tuple(ids)) in self._kept

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def _find(self, key: tuple[Any, ...]) -> Any:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def _keep(self, key: tuple[Any, ...], value: Any, size: int) -> None:
        self._kept[key] = (value, size)
        total = self.nbytes
        while total > self.limit and len(self._kept) > 1:
            total -= self._kept.popitem(last=False)[1][1]


class _Reached(Exception):
    """The decoder is about to run; nobody but `encode` sees this."""


def encode(model: Target, medium: Medium, ids: Sequence[int]) -> MediaFeatures:
    """Run a stock model up to its decoder on one medium's placeholders."""
    given: dict[str, Any] = {}

    def stop(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.update(kwargs)
        raise _Reached

    row = torch.tensor([list(ids)], device=model.device)
    tensors = {**join(model.config, [medium]), **type_ids(model.config, ids)}
    inputs = {
        name: value.to(device=model.device, dtype=model.dtype if value.is_floating_point() else None)
        for name, value in tensors.items()
    }
    count = 3 if model.has_rope_index else 1
    places = torch.arange(len(ids), device=model.device).expand(count, 1, -1)
    inputs["position_ids"] = places if model.has_rope_index else places[0]
    handle = model.decoder.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        model.model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False, **inputs)
    except _Reached:
        pass
    finally:
        handle.remove()
    embeddings = given["inputs_embeds"][0].to(model.device)
    return MediaFeatures(embeddings, tuple(_dense(given, embeddings)))


def _dense(given: dict[str, Any], like: Tensor) -> Iterator[Tensor]:
    """``[n, d]`` per layer of the features that a model adds at visual positions alone."""
    for part in given.get("deepstack_visual_embeds") or ():
        dense = torch.zeros_like(like)
        dense[given["visual_pos_masks"][0].to(like.device)] = part.to(like)
        yield dense


def tower_of(model: Any) -> nn.Module | None:
    """The vision tower of a loaded model; None where there is none under a known name."""
    base = getattr(model, "base_model", model)
    return next((m for name in TOWERS if isinstance(m := getattr(base, name, None), nn.Module)), None)


_COMPARED: WeakKeyDictionary[nn.Module, tuple[nn.Module, bool]] = WeakKeyDictionary()


def _same_towers(models: Sequence[Target]) -> bool:
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
        alike = alike and all(
            t.shape == theirs[n].shape and torch.equal(t, theirs[n]) for n, t in ours.items()
        )
        _COMPARED[first] = known = (second, alike)
    return known[1]


@contextmanager
def _listening(tower: nn.Module) -> Iterator[list[Any]]:
    """Collect what a tower returns, call by call."""
    outputs: list[Any] = []
    handle = tower.register_forward_hook(lambda _, __, output: outputs.append(_copied(output)))
    try:
        yield outputs
    finally:
        handle.remove()


@contextmanager
def _answering(tower: nn.Module, outputs: Sequence[Any]) -> Iterator[None]:
    """A tower returns known outputs, call by call, without running."""
    left = iter(outputs)
    own: Callable[..., Any] | None = tower.__dict__.get("forward")
    tower.forward = lambda *_, **__: _copied(next(left))
    try:
        yield
    finally:
        if own is None:
            del tower.forward
        else:
            tower.forward = own


def _copied(output: Any) -> Any:
    """A tower's output that its caller may change without changing ours."""
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
