"""One adapter for every stock Hugging Face model: prompt prefill and forwards over draft trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from saccade.errors import ModelError
from saccade.inputs.batch import join, media_spans, type_ids
from saccade.inputs.prompt import Prompt
from saccade.target.cache import SlotCache
from saccade.target.early import leaving_before
from saccade.target.families import Family
from saccade.target.features import FeatureTap, Hidden
from saccade.target.lean import LeanDecoder, gives_stock_logits, lean_decoder
from saccade.target.masks import starts
from saccade.target.placing import check_types, continuation_mask, rope_positions
from saccade.target.selected import Mask, Merged, held_of, kept_of, only
from saccade.target.stopwatch import Stopwatch


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a prompt's forward gave.

    Attributes:
        logits: ``[V]`` after the last prompt token.
        rope_delta: what to add to a row's length to get its next text position (0 without M-RoPE or gaps).
        vision_seconds: time spent in the vision tower and projector.
    """

    logits: Tensor
    rope_delta: int
    vision_seconds: float


class Target:
    """A loaded model, called in the two ways that speculative decoding needs.

    Args:
        model: a stock Hugging Face causal or image-text-to-text model, on one device or spread by
            ``device_map``. It is put into eval mode and otherwise left as it is.
        lean: whether a lean decoder may take the place of the stock modules in tree forwards, once it has
            given the same logits (see `saccade.target.lean`); architectures outside the conformance suite
            start without, see `use_lean`.

    Raises:
        ModelError: the model has no decoder layers that could be drafted for.
    """

    def __init__(self, model: Any, lean: bool = True) -> None:
        self.model = model.eval()
        self.config: Any = self.model.config
        self.text_config: Any = self.config.get_text_config(decoder=True)
        self.family = Family.of(self.config)
        self.decoder = _decoder(self.model)
        self.layers: nn.ModuleList = self.decoder.layers
        self._embeddings: Any = self.model.get_input_embeddings()
        self.device: torch.device = _place(self._embeddings)
        self.vocab_size: int = self.model.get_output_embeddings().weight.shape[0]
        base = getattr(self.model, "base_model", self.model)
        self._rope_index = getattr(base, "get_rope_index", None)
        self._layer_devices = [_place(layer) for layer in self.layers]
        self._stock_only = 0
        self._lean: LeanDecoder | None = None
        if lean and self.family.tested:
            self.use_lean()

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's weights as they are now; a mask of another one would be misread."""
        dtype: torch.dtype = self._embeddings.weight.dtype
        return dtype

    @property
    def is_lean(self) -> bool:
        """Whether tree forwards run on a lean decoder."""
        return self._lean is not None and self._lean.is_current and not self._stock_only

    @contextmanager
    def stock(self) -> Iterator[None]:
        """Tree forwards run through the stock modules while this is open (hooks on them fire)."""
        self._stock_only += 1
        try:
            yield
        finally:
            self._stock_only -= 1

    def new_cache(self, batch: int, capacity: int) -> SlotCache:
        """An empty KV cache for ``batch`` rows of ``capacity`` entries."""
        return SlotCache(self._layer_devices, batch, capacity)

    @torch.inference_mode()
    def prefill(
        self,
        cache: SlotCache,
        row: int,
        prompt: Prompt,
        start: int = 0,
        hidden: Hidden | None = None,
        dropped: Sequence[int] = (),
        merged: Merged | None = None,
    ) -> Prefill:
        """Run one row's prompt from position ``start`` on and commit it to the cache.

        Args:
            start: how many leading ids the row's cache already holds; never inside an image.
            hidden: filled with the states of the ids that run, ``[1, S - start, d]`` if none is dropped.
            dropped: ascending positions, before ``start`` too, that the decoder never sees; the others keep theirs.
            merged: embeddings of this model that spare it looking at the media again, where some are dropped.

        Raises:
            InputError: the prompt is empty or longer than the model's context.
            ModelError: it has images that nothing here can tell the model to read.
        """
        self.check_length(len(prompt))
        if prompt.media:
            check_types(self.model)
        held = held_of(start, dropped)
        if cache.lengths[row] != held:
            raise ModelError(f"Row {row} holds {cache.lengths[row]} entries, not the {held} to go on from.")
        spans = media_spans(self.config, prompt)
        words = self.model.get_input_embeddings()
        known = merged.of(prompt, start, spans, words) if merged is not None and dropped else {}
        media = [m for m, (first, _) in zip(prompt.media, spans, strict=True) if first >= start and not known]
        ids = torch.tensor([prompt.ids], device=self.device)
        inputs: dict[str, Any] = {
            name: value.to(device=self.device, dtype=self.dtype if value.is_floating_point() else None)
            for name, value in join(self.config, media).items()
        }
        positions, delta = self.positions(ids, prompt)
        if positions is not None:
            inputs["position_ids"] = positions[..., start:]
        elif start or dropped:
            inputs["position_ids"] = torch.arange(start, len(prompt), device=self.device)[None]
        kept = kept_of(start, len(prompt), dropped)
        choosing: AbstractContextManager[None] = nullcontext()
        if start or dropped:
            mask = inputs["attention_mask"] = continuation_mask(self, prompt, start, kept, dropped)
            if dropped:
                choosing = only(self.decoder, [i - start for i in kept], mask, known)
        else:
            inputs["attention_mask"] = torch.ones_like(ids)
            types = type_ids(self.config, prompt.ids)
            inputs.update({name: value.to(self.device) for name, value in types.items()})
        cache.writing_prompt(row, len(kept))
        with Stopwatch(self.model) as vision, self._tapped(hidden), choosing:
            out = self.model(
                input_ids=ids[:, start:], past_key_values=cache, use_cache=True, logits_to_keep=1, **inputs
            )
        cache.keep_first(row, len(kept))
        return Prefill(out.logits[0, -1], delta + len(dropped), vision.seconds)

    @torch.inference_mode()
    def forward(
        self,
        cache: SlotCache,
        tokens: Tensor,
        allow: Tensor,
        depth: Tensor,
        deltas: Tensor,
        hidden: Hidden | None = None,
        shift: Tensor | None = None,
    ) -> Tensor:
        """Run new tokens behind every row's committed and pending entries.

        Args:
            tokens: ``[B, Q]`` ids.
            allow: ``[B or 1, Q, T]`` bool; which of the T uncommitted entries (pending ones first, then
                these) each token attends to; each must see itself.
            depth: ``[B or 1, T]`` positions of the uncommitted entries relative to their row's length.
            deltas: ``[B, 1]`` rope deltas from prefill.
            hidden: filled with the states of these tokens, ``[B, Q, d]``.
            shift: gaps between the committed entries, see `MaskPlan.build`.

        Returns:
            Logits ``[B, Q, V]`` in the model's dtype.
        """
        mask, positions = self._placed(cache, tokens.shape[1], allow, depth, deltas, shift)
        if self.is_lean and isinstance(mask, Tensor):
            assert self._lean is not None
            return self._lean(tokens, mask, positions, cache, hidden)
        with self._tapped(hidden):
            return self._run(cache, tokens, mask, positions)

    @torch.inference_mode()
    def early(
        self,
        cache: SlotCache,
        tokens: Tensor,
        allow: Tensor,
        depth: Tensor,
        deltas: Tensor,
        layer: int,
        shift: Tensor | None = None,
    ) -> Tensor:
        """As `forward`, but no further than what enters ``layer``, ``[B, Q, d]``.

        The later layers' entries are not written, so that these pending entries can only be dropped.
        """
        mask, positions = self._placed(cache, tokens.shape[1], allow, depth, deltas, shift)
        if self.is_lean and isinstance(mask, Tensor):
            assert self._lean is not None
            return self._lean(tokens, mask, positions, cache, until=layer)
        with leaving_before(self.layers[layer]) as found:
            self._run(cache, tokens, mask, positions)
        return found[0].to(self.device)

    def _placed(
        self,
        cache: SlotCache,
        count: int,
        allow: Tensor,
        depth: Tensor,
        deltas: Tensor,
        shift: Tensor | None,
    ) -> tuple[Mask, Tensor]:
        """Mask and positions of ``count`` new tokens, for which the cache makes room."""
        slots = cache.writing_nodes(count)
        mask = self.family.masks.build(allow, cache.lengths, depth, slots, self.dtype, shift)
        lengths: int | Tensor = cache.lengths[0]
        if min(cache.lengths) != max(cache.lengths):
            lengths = starts(tuple(cache.lengths), self.device)
        positions = depth[:, depth.shape[1] - count :] + deltas + lengths  # [B, Q]
        if self._rope_index is None:
            return mask, self.family.limits.within(positions, cache.lengths)
        return mask, self.family.limits.within(positions, cache.lengths, deltas).expand(3, -1, -1)

    def _run(self, cache: SlotCache, tokens: Tensor, mask: Mask, positions: Tensor) -> Tensor:
        logits: Tensor = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).logits
        return logits

    @contextmanager
    def _tapped(self, hidden: Hidden | None) -> Iterator[None]:
        """Hooks on the stock modules for the states that are wanted, if any."""
        if hidden is None:
            yield
            return
        with FeatureTap(self, hidden.layers, hidden.final) as tap:
            yield
        hidden.states = tap.hidden

    @torch.inference_mode()
    def use_lean(self) -> None:
        """Put a lean decoder in place if the architecture fits and it gives the stock model's logits."""
        self._lean = lean_decoder(self.model, self.decoder)
        if self._lean is not None and not gives_stock_logits(self):
            self._lean = None

    def check_length(self, length: int) -> None:
        """Raise `InputError` when a sequence of ``length`` tokens does not fit the model's context."""
        self.family.limits.check(length)

    def positions(self, ids: Tensor, prompt: Prompt) -> tuple[Tensor | None, int]:
        """M-RoPE positions ``[3, 1, S]`` of the whole prompt and its rope delta; (None, 0) without M-RoPE."""
        if self._rope_index is None:
            return None, 0
        return rope_positions(self._rope_index, self.config, ids, prompt)


def _decoder(model: Any) -> Any:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or not hasattr(decoder, "layers"):
        raise ModelError(
            f"{type(model).__name__} has no decoder layers; expected a causal language model or an "
            "image-text-to-text model of transformers."
        )
    return decoder


def _place(module: nn.Module) -> torch.device:
    """Where a module computes: its weights' device, or, for offloaded weights, where they are brought to run."""
    hook = getattr(module, "_hf_hook", None)
    execution = getattr(hook, "execution_device", None)
    if execution is not None:
        return torch.device(execution) if not isinstance(execution, int) else torch.device("cuda", execution)
    return next(module.parameters()).device
