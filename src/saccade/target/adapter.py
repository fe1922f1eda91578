"""One adapter for every stock Hugging Face model: forwards over prompts and draft trees of many rows at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from saccade.errors import ModelError
from saccade.inputs.padded import join
from saccade.inputs.prompt import Prompt
from saccade.target.cache import RowCache, on_device, to_device
from saccade.target.families import Family
from saccade.target.forward import ForwardOutput, Requirements, TokenBlock, replaced_embeddings
from saccade.target.hidden_states import FeatureTap, early_exit
from saccade.target.layout import ALL, Layout, Span
from saccade.target.lean import LeanDecoder, gives_stock_logits, lean_decoder
from saccade.target.packed import can_pack, labels, packing
from saccade.target.positions import rope_positions


class Target:
    """A loaded model, called as speculative decoding needs it.

    Args:
        model: a stock Hugging Face causal or image-text-to-text model, on one device or spread by
            ``device_map``. It is put into eval mode and otherwise left as it is.
        lean: whether a lean decoder may take the place of the stock modules, once it has given the same logits (see
            `saccade.target.lean`); architectures outside the conformance suite start without, see `use_lean`.

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
        self._packs = self.family.tested and can_pack(self.decoder)
        self._stock_only = 0
        self._pinned: bool | None = None
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
        """Whether forwards run on a lean decoder."""
        if self._lean is None or self._stock_only:
            return False
        return self._lean.is_current if self._pinned is None else self._pinned

    @property
    def has_rope_index(self) -> bool:
        """Whether positions are those of M-RoPE."""
        return self._rope_index is not None

    @property
    def entry_bytes(self) -> int:
        """Bytes of one cache entry over all layers, as the configuration tells."""
        text = self.text_config
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return int(2 * heads * dim * len(self.layers) * self._embeddings.weight.element_size())

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """The model is taken to stay as it is while this is open: it is looked at once, not before every forward."""
        before = self._pinned
        self._pinned = self._lean is not None and self._lean.is_current
        try:
            yield
        finally:
            self._pinned = before

    @contextmanager
    def stock(self) -> Iterator[None]:
        """Forwards run through the stock modules while this is open (hooks on them fire)."""
        self._stock_only += 1
        try:
            yield
        finally:
            self._stock_only -= 1

    def new_cache(self, rows: int) -> RowCache:
        """An empty KV cache for up to ``rows`` rows."""
        return RowCache(self._layer_devices, rows)

    def embed(self, ids: Tensor) -> Tensor:
        """The decoder's embeddings ``[..., d]`` of ids."""
        embedded: Tensor = self._embeddings(ids)
        return embedded

    @torch.inference_mode()
    def forward(
        self, cache: RowCache, pieces: Sequence[TokenBlock], needs: Requirements | None = None
    ) -> list[ForwardOutput]:
        """Run new tokens of some rows behind their committed and pending entries, as one packed sequence.

        Where the model cannot take such a sequence, rows run one after the other. Rows on different sides of a
        longrope embedding's turn never share a pass, because the longest one decides for all of it.

        Returns:
            One reading per piece.
        """
        needs = needs or Requirements()
        if self.family.limits.turn is None:
            return self._packed(cache, pieces, needs)
        parts = [list(_rows_of(piece)) for piece in pieces]
        singles = [single for part in parts for single in part]
        readings: dict[int, ForwardOutput] = {}
        for chosen in self._sides(cache, singles):
            found = self._packed(cache, [singles[i] for i in chosen], needs)
            readings.update(zip(chosen, found, strict=True))
        ordered = iter([readings[i] for i in range(len(singles))])
        return [_together([next(ordered) for _ in part]) for part in parts]

    @torch.inference_mode()
    def early_exit(self, cache: RowCache, piece: TokenBlock, layer: int) -> Tensor:
        """As `forward`, but no further than what enters ``layer``, ``[A, n, d]``.

        The later layers' entries are not written, so that these pending entries can only be dropped.
        """
        singles = list(_rows_of(piece))
        states: list[Tensor] = [piece.tokens] * len(singles)
        for chosen in self._sides(cache, singles):
            if not self.is_lean:
                for place in chosen:
                    with early_exit(self.layers[layer]) as entering:
                        self._stock(cache, singles[place])
                    states[place] = entering[0].to(self.device)
                continue
            assert self._lean is not None
            part = [singles[place] for place in chosen]
            layout, positions, _ = self._laid(cache, part)
            x = torch.cat([self.embed(single.tokens)[0] for single in part])
            found = self._lean(x, positions, cache, layout, until=layer).normed
            for place, state in zip(chosen, found.split(piece.count), strict=True):
                states[place] = state[None]
        return torch.cat(states)

    def _sides(self, cache: RowCache, pieces: Sequence[TokenBlock]) -> list[list[int]]:
        """Pieces of one row each that may share a pass."""
        sides = [self._is_long(cache, piece) for piece in pieces]
        groups = [[i for i, side in enumerate(sides) if side is wanted] for wanted in (False, True)]
        return [group for group in groups if group]

    def _is_long(self, cache: RowCache, piece: TokenBlock) -> bool:
        """On which side of a longrope embedding's turn a piece's row stands, by what it holds after it."""
        limits = self.family.limits
        if limits.turn is None:
            return False
        # Of a prompt's tokens, which come with their positions, those with guesses behind them end where logits begin.
        new = 0 if piece.positions is None else min(piece.logits_from + 1, piece.count)
        return limits.is_long(cache.lengths[piece.rows[0]] + new)

    def _packed(
        self, cache: RowCache, pieces: Sequence[TokenBlock], needs: Requirements
    ) -> list[ForwardOutput]:
        if not self.is_lean and (sum(len(p.rows) for p in pieces) == 1 or not self._packs):
            return [self._row_by_row(cache, piece, needs) for piece in pieces]
        layout, positions, wanted = self._laid(cache, pieces)
        given = [p.embeddings if p.embeddings is not None else self.embed(p.tokens) for p in pieces]
        x = given[0].flatten(0, 1) if len(given) == 1 else torch.cat([g.flatten(0, 1) for g in given])
        if self.is_lean:
            assert self._lean is not None
            found = self._lean(x, positions, cache, layout, needs=needs, added=_added(pieces))
            logits = self._lean.logits(found.normed if wanted is None else found.normed[wanted])
            return _apart(pieces, logits, found.hidden)
        tokens = torch.cat([piece.tokens.flatten() for piece in pieces])[None]
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "attention_mask": labels(self.family.masks.kinds, x),
            "position_ids": self._stock_positions(positions[:, None]),
            "past_key_values": cache,
            "use_cache": True,
        }
        if wanted is not None:
            inputs["logits_to_keep"] = wanted
        instead: AbstractContextManager[Any] = nullcontext()
        if any(piece.embeddings is not None for piece in pieces):
            instead = replaced_embeddings(self.decoder, x[None], inputs["attention_mask"], _added(pieces))
        with packing(self.decoder, cache), self._tapped(needs) as states, instead:
            logits = self.model(**inputs).logits[0].to(self.device)
        return _apart(pieces, logits, {i: s[0] for i, s in states.items()})

    @contextmanager
    def _tapped(self, needs: Requirements) -> Iterator[dict[int, Tensor]]:
        """Hooks on the stock modules for the states that are wanted, if any."""
        if not needs.layers:
            yield {}
            return
        with FeatureTap(self, needs.layers, needs.final) as tap:
            yield tap.hidden

    def _stock_positions(self, places: Tensor) -> Tensor:
        """``[3 or 1, 1, n]`` as the model takes them."""
        if self._rope_index is None:
            return places[0]
        return places.expand(3, -1, -1)

    def _laid(self, cache: RowCache, pieces: Sequence[TokenBlock]) -> tuple[Layout, Tensor, Tensor | None]:
        """Layout, positions ``[3 or 1, T]``, and which tokens' logits are wanted (None: all of them)."""
        positions = [self._positions(cache, piece).flatten(1) for piece in pieces]
        layout = cache.plan_layout([(piece.rows, piece.count, self._masks(cache, piece)) for piece in pieces])
        if len({p.shape[0] for p in positions}) > 1:  # text beside a prompt with M-RoPE positions
            positions = [p.expand(3, -1) for p in positions]
        joint = positions[0] if len(positions) == 1 else torch.cat(positions, 1)
        if not any(piece.logits_from for piece in pieces):
            return layout, joint, None
        wanted, at = [], 0
        for piece in pieces:
            for _ in piece.rows:
                wanted.append(torch.arange(at + piece.logits_from, at + piece.count))
                at += piece.count
        return layout, joint, to_device(torch.cat(wanted), self.device)

    def _masks(self, cache: RowCache, piece: TokenBlock) -> dict[str, Tensor | None]:
        rows = piece.rows
        return self.family.masks.build(
            piece.allow,
            [cache.lengths[row] for row in rows],
            piece.count,
            cache.pending[rows[0]],
            piece.depth,
            self.dtype,
            self.device,
            piece.shift,
        )

    def _positions(self, cache: RowCache, piece: TokenBlock) -> Tensor:
        """``[3 or 1, A, n]`` where a piece's tokens stand."""
        if piece.positions is not None:
            return piece.positions
        count, rows = piece.count, piece.rows
        depth = piece.depth
        if depth is None:
            held = cache.pending[rows[0]]
            depth = torch.arange(held, held + count, device=self.device)[None]
        deltas = piece.deltas or [0] * len(rows)
        lengths = [cache.lengths[row] for row in rows]
        first = [n + d for n, d in zip(lengths, deltas, strict=True)]
        behind = depth[:, depth.shape[1] - count :]
        if min(first) == max(first):
            placed = (behind + first[0]).expand(len(rows), -1)
        else:
            placed = behind + on_device(first, self.device)[:, None]
        ahead = None
        if max(deltas) > 0:
            ahead = on_device(list(deltas), self.device)[:, None]
        return self.family.limits.within(placed, lengths, ahead)[None]

    # -- the stock modules, a row at a time ----------------------------------------------------------------

    def _row_by_row(self, cache: RowCache, piece: TokenBlock, needs: Requirements) -> ForwardOutput:
        logits: list[Tensor] = []
        states: list[dict[int, Tensor]] = []
        for single in _rows_of(piece):
            with self._tapped(needs) as found:
                logits.append(self._stock(cache, single))
            states.append(found)
        hidden = {i: torch.cat([s[i] for s in states]) for i in needs.layers}
        return ForwardOutput(torch.cat(logits), hidden)

    def _stock(self, cache: RowCache, piece: TokenBlock) -> Tensor:
        """Logits ``[1, n - logits_from, V]`` of a piece of one row."""
        layout, positions, _ = self._laid(cache, [piece])
        (span,) = layout.spans
        masks = {
            kind: m if (m := span.mask(kind)) is not None else self._all_seen(span) for kind in span.masks
        }
        inputs: dict[str, Any] = {
            "input_ids": piece.tokens,
            "attention_mask": masks if self.family.masks.kinds else masks[ALL],
            "position_ids": self._stock_positions(positions[:, None]),
            "past_key_values": cache,
            "use_cache": True,
        }
        if piece.logits_from:
            inputs["logits_to_keep"] = max(piece.count - piece.logits_from, 1)
        if piece.embeddings is None:
            logits: Tensor = self.model(**inputs).logits
        else:
            with replaced_embeddings(self.decoder, piece.embeddings, inputs["attention_mask"], piece.added):
                logits = self.model(**inputs).logits
        return logits[:, logits.shape[1] - (piece.count - piece.logits_from) :].to(self.device)

    @torch.inference_mode()
    def whole(self, cache: RowCache, row: int, prompt: Prompt, needs: Requirements) -> ForwardOutput:
        """Run a whole prompt through the stock model, media as they are, behind nothing; its entries are pending.

        For families whose placeholders nobody knows; `InputError` and `ModelError` as the model raises them.
        """
        ids = torch.tensor([prompt.ids], device=self.device)
        piece = TokenBlock([row], ids, logits_from=len(prompt) - 1)
        self._laid(cache, [piece])
        inputs: dict[str, Any] = {
            name: value.to(device=self.device, dtype=self.dtype if value.is_floating_point() else None)
            for name, value in join(self.config, prompt.media).items()
        }
        inputs.update(
            attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        positions, _ = self.positions(ids, prompt)
        if positions is not None:
            inputs["position_ids"] = positions
        with self._tapped(needs) as states:
            logits = self.model(input_ids=ids, **inputs).logits
        return ForwardOutput(logits, states)

    def _all_seen(self, span: Span) -> Tensor:
        return torch.zeros(1, 1, span.count, span.visible, dtype=self.dtype, device=self.device)

    # -- what is proved at load ----------------------------------------------------------------------------

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


def _rows_of(piece: TokenBlock) -> Iterator[TokenBlock]:
    """The rows of a piece, one by one."""
    if len(piece.rows) == 1:
        yield piece
        return
    for place, row in enumerate(piece.rows):
        one = slice(place, place + 1)

        def mine(tensor: Tensor | None, one: slice = one) -> Tensor | None:
            return tensor if tensor is None or tensor.shape[0] == 1 else tensor[one]

        yield TokenBlock(
            rows=[row],
            tokens=piece.tokens[one],
            allow=mine(piece.allow),
            depth=mine(piece.depth),
            deltas=piece.deltas[one] if piece.deltas else (),
            shift=mine(piece.shift),
            embeddings=mine(piece.embeddings),
            positions=None if piece.positions is None else piece.positions[:, one],
            logits_from=piece.logits_from,
        )


def _together(readings: Sequence[ForwardOutput]) -> ForwardOutput:
    """The readings of a piece's rows as one."""
    if len(readings) == 1:
        return readings[0]
    hidden = {layer: torch.cat([r.hidden[layer] for r in readings]) for layer in readings[0].hidden}
    return ForwardOutput(torch.cat([r.logits for r in readings]), hidden)


def _apart(pieces: Sequence[TokenBlock], logits: Tensor, states: dict[int, Tensor]) -> list[ForwardOutput]:
    """The readings of pieces from what a packed forward gave.

    Args:
        logits: ``[n, V]`` of the tokens whose logits are wanted, in order.
        states: index of the layer -> ``[T, d]``.
    """
    readings, at, said = [], 0, 0
    for piece in pieces:
        rows, count = piece.tokens.shape
        hidden = {i: s[at : at + rows * count].view(rows, count, -1) for i, s in states.items()}
        size = rows * (count - piece.logits_from)
        part = logits[said : said + size].view(rows, count - piece.logits_from, logits.shape[-1])
        readings.append(ForwardOutput(part, hidden))
        at, said = at + rows * count, said + size
    return readings


def _added(pieces: Sequence[TokenBlock]) -> list[Tensor]:
    """Per layer ``[T, d]`` what is added to the packed sequence behind it; empty where nothing is."""
    layers = max(len(piece.added) for piece in pieces)
    joint = []
    for layer in range(layers):
        parts = []
        for piece in pieces:
            size = piece.tokens.numel()
            like = next(p.added[0] for p in pieces if p.added)
            parts.append(piece.added[layer] if piece.added else like.new_zeros(size, like.shape[-1]))
        joint.append(torch.cat(parts))
    return joint


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
