"""Features of images and videos, cached by digest."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from saccade.inputs.families.family import Medium, Prompt
from saccade.options import MEDIA_BYTES
from saccade.target_model.adapter import EndingAt, Target
from saccade.target_model.cache import on_device

MOST_TOGETHER = 8192  # most placeholders of images that are encoded in one call
TOWERS = ("vision_tower", "vision_model", "visual")  # attribute names of vision towers in models of transformers


@dataclass(frozen=True, slots=True)
class MediaFeatures:
    """Decoder inputs of one image or video."""

    embeddings: Tensor  # `[n, d]` for the ids from the medium's first placeholder to its last
    # per first layers of the decoder `[n, d]` features added to the residual stream after each (Qwen3-VL), zeros at
    # text tokens
    deepstack: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (self.embeddings, *self.deepstack))


class MediaCache:
    """Least-recently-used cache of features by model and digest.

    Where two models have the same vision tower (a draft VLM around its target's frozen one), it runs once for both.
    """

    def __init__(self, limit: int = MEDIA_BYTES) -> None:
        self.limit = limit  # bytes; 0 caches only the medium that was encoded last
        self.lookups = self.misses = 0
        self.counted: Target | None = None  # the target; None: every model's look-ups count
        self.timed: Callable[[], AbstractContextManager[None]] = nullcontext  # around what encodes the target's media
        self._entries: OrderedDict[tuple[Any, ...], tuple[Any, int]] = OrderedDict()
        self._sharing: list[Target] = []

    @property
    def hits(self) -> int:
        """Look-ups of features that were not encoded for them."""
        return self.lookups - self.misses

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
        is_target = self.counted is None or self.counted is model
        counts = is_target and not again
        self.lookups += counts
        key = _key(model, medium, ids)
        features: MediaFeatures | None = self._find(key)
        if features is not None:
            return features
        self.misses += counts
        tower = tower_of(model.model) if any(m is model for m in self._sharing) else None
        tower_key = ("tower", medium.digest)
        outputs = None if tower is None else self._find(tower_key)
        stage = self.timed() if is_target else nullcontext()
        with stage, model.threads.on("vision", len(ids)), _remembering(tower, outputs) as recorded:
            (features,) = encode(model, [(medium, ids)])
        if tower is not None and outputs is None:
            self._store(tower_key, recorded, sum(t.nbytes for t in _tensors(recorded)))
        self._store(key, features, features.nbytes)
        return features

    @torch.inference_mode()
    def prepare(self, model: Target, media: Sequence[tuple[Medium, Sequence[int]]]) -> None:
        """Encode the images among media, those that are not cached, in one call; where it fails, `features` does it."""
        if len(media) < 2 or model.exact or any(m is model for m in self._sharing):
            return
        new = dict[tuple[Any, ...], tuple[Medium, Sequence[int]]]()
        for medium, ids in media:
            if medium.kind == "image" and not self.has(model, medium, ids):
                new[_key(model, medium, ids)] = medium, ids
        tokens = sum(len(ids) for _, ids in new.values())
        size = tokens * model.text_config.hidden_size * model.dtype.itemsize
        if len(new) < 2 or tokens > MOST_TOGETHER or 2 * size > self.limit:
            return
        is_target = self.counted in (None, model)
        stage = self.timed() if is_target else nullcontext()
        # Of one of them, or of memory: `features` encodes each alone, and raises what fails again.
        with suppress(Exception), stage, model.threads.on("vision", tokens):
            for key, features in zip(new, encode(model, list(new.values())), strict=True):
                self._store(key, features, features.nbytes)
                self.misses += is_target

    def has(self, model: Target, medium: Medium, ids: Sequence[int]) -> bool:
        """Whether a medium's features are cached."""
        return _key(model, medium, ids) in self._entries

    def _find(self, key: tuple[Any, ...]) -> Any:
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def _store(self, key: tuple[Any, ...], value: Any, size: int) -> None:
        self._entries[key] = (value, size)
        total = self.nbytes
        while total > self.limit and len(self._entries) > 1:
            _, (_, freed) = self._entries.popitem(last=False)
            total -= freed


def _key(model: Target, medium: Medium, ids: Sequence[int]) -> tuple[Any, ...]:
    return "features", id(model.model), medium.digest, tuple(ids)


def encode(model: Target, media: Sequence[tuple[Medium, Sequence[int]]]) -> list[MediaFeatures]:
    """Run a stock model up to its decoder on the placeholders of some media, one after the other."""
    ids: tuple[int, ...] = ()
    for _, own in media:
        ids += tuple(own)
    row = on_device([list(ids)], model.device)
    places = torch.arange(len(ids), device=model.device)[None]
    inputs = {
        **model.media_inputs(Prompt(ids, tuple(medium for medium, _ in media))),
        "position_ids": places.expand(model.rope_axes, 1, -1) if model.has_rope_index else places,
    }
    with EndingAt(model.decoder) as inputs_of_decoder:
        model.model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False, **inputs)
    embeddings = inputs_of_decoder["inputs_embeds"][0].to(model.device)
    deepstack = []
    for part in inputs_of_decoder.get("deepstack_visual_embeds") or ():
        dense = torch.zeros_like(embeddings)
        dense[inputs_of_decoder["visual_pos_masks"][0].to(dense.device)] = part.to(dense)
        deepstack.append(dense)
    if len(media) == 1:
        return [MediaFeatures(embeddings, tuple(deepstack))]
    features, start = [], 0
    for _, own in media:
        part = slice(start, start + len(own))
        start = part.stop
        # Copies: a view would hold the features of all.
        layers = [layer[part].clone() for layer in deepstack]
        features.append(MediaFeatures(embeddings[part].clone(), tuple(layers)))
    return features


def tower_of(model: Any) -> nn.Module | None:
    """Return a model's vision tower; None without one of a known name."""
    base = getattr(model, "base_model", model)
    towers = [getattr(base, name, None) for name in TOWERS]
    return next((tower for tower in towers if isinstance(tower, nn.Module)), None)


_COMPARED: WeakKeyDictionary[nn.Module, tuple[nn.Module, bool]] = WeakKeyDictionary()
"""Tower -> another one, and whether all their weights are equal, which is compared once."""


def _have_equal_towers(models: Sequence[Target]) -> bool:
    """Whether all models have equal towers."""
    first, *others = (tower_of(m.model) for m in models)
    if first is None or len({(m.dtype, m.device) for m in models}) > 1:
        return False
    for other in others:
        if other is None:
            return False
        known = _COMPARED.get(first)
        if known is None or known[0] is not other:
            ours, theirs = first.state_dict(), other.state_dict()
            alike = type(first) is type(other) and ours.keys() == theirs.keys()
            alike = alike and all(torch.equal(ours[name], theirs[name]) for name in ours)
            _COMPARED[first] = known = (other, alike)
        if not known[1]:
            return False
    return True


@contextmanager
def _remembering(tower: nn.Module | None, outputs: Sequence[Any] | None) -> Iterator[list[Any]]:
    """Record a tower's outputs, call by call, or return recorded ones without running it."""
    recorded: list[Any] = []
    if tower is None:
        yield recorded
        return
    replaced, forward = tower.__dict__.get("forward"), tower.forward
    remaining = iter(outputs or ())

    def run(*args: Any, **kwargs: Any) -> Any:
        recorded.append(forward(*args, **kwargs) if outputs is None else next(remaining))
        output = recorded[-1]  # of which the caller gets a copy, which it may change
        return type(output)(**output) if isinstance(output, ModelOutput) else copy.copy(output)

    tower.forward = run
    try:
        yield recorded
    finally:
        if replaced is None:
            del tower.forward
        else:
            tower.forward = replaced


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
