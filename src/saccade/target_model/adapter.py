"""Adapter of a stock Hugging Face model: forwards over prompts and draft trees of many rows at once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from saccade.errors import InputError, ModelError
from saccade.inputs.families import family_of
from saccade.inputs.families.family import Prompt
from saccade.options import INT8, STORED
from saccade.target_model.agreement import gives_stock_logits, is_exact
from saccade.target_model.cache import Carried, RowCache, to_device
from saccade.target_model.exact import exact_decoder
from saccade.target_model.executor import Ahead, Executor, chosen
from saccade.target_model.graphs import GraphExecutor
from saccade.target_model.int8 import round_weights
from saccade.target_model.lean import LeanExecutor, lean_decoder
from saccade.target_model.linear import StepThreads
from saccade.target_model.openvino import OpenVinoExecutor
from saccade.target_model.openvino_graph import missing
from saccade.target_model.recurrent import CHECKPOINTS, RECURRENT_TYPES, wrap_functions
from saccade.target_model.sharding import HOLDER, Ranks, Shards
from saccade.target_model.stock import StockExecutor, captured_states
from saccade.target_model.token_blocks import ForwardOutput, Layout, Requirements, TokenBlock, concat_outputs
from saccade.target_model.traits import (
    ModelTraits,
    check_generation,
    compute_device,
    crossing_layers,
    entry_shapes,
    layer_types,
)
from saccade.tree import DraftTree

_STOCK_INPUTS = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
"""Forward arguments that every model takes."""


def decoder_and_head(model: Any) -> tuple[Any, Any]:
    """Return the module with the decoder's layers and the LM head, which may be those of a wrapped language model."""
    head, decoder, inner = model.get_output_embeddings(), None, model.get_decoder()
    while inner is not decoder and not hasattr(inner, "layers"):
        decoder, inner = inner, inner.get_decoder()
        head = decoder.get_output_embeddings() if head is None else head
        inner = getattr(decoder, "model", decoder) if inner is decoder else inner
    return inner, head


def check_executor(name: str) -> None:
    """Raise `InputError` for a name that is none of an executor, and `ModelError` for one that cannot be used here."""
    if chosen(name) == "openvino" and (problem := missing()):
        raise ModelError(f"The executor openvino cannot be used: {problem}.")


class _Reached(Exception):
    """Raised right before a module runs."""


class EndingAt:
    """End a forward right before a module runs; gives its arguments by name, the first one as ``hidden_states``."""

    # No generator: one that swallows an exception is held by it in Python 3.12, with its callers and their caches.

    def __init__(self, module: nn.Module) -> None:
        self._arguments: dict[str, Any] = {}
        self._handle = module.register_forward_pre_hook(self._stop, with_kwargs=True, prepend=True)

    def _stop(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._arguments.update({"hidden_states": args[0]} if args else {}, **kwargs)
        raise _Reached

    def __enter__(self) -> dict[str, Any]:
        return self._arguments

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._handle.remove()
        return kind is _Reached


class OneProcess:
    """The only rank of a whole target, with the interface of `Ranks`: there is nothing to send."""

    is_split = False
    shares = 1
    rank = 0

    def numbers(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def tensors(self, numbers: Sequence[int], parts: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
        return list(numbers), list(parts)

    def tree(self, tree: DraftTree) -> DraftTree:
        return tree


class Target:
    """A loaded model with the forwards of speculative decoding."""

    ending_at = EndingAt

    def __init__(
        self,
        model: Any,
        executor: str = "auto",
        exact: bool = False,
        base: Target | None = None,
        weights: str = STORED,
    ) -> None:
        check_generation(model)
        self.weights = weights  # one of `saccade.options.WEIGHTS`
        self._base = base  # whose weights the model shares, with adapters on top; None for a model of its own
        self.model = model.eval()
        self.config: Any = self.model.config
        self.text_config: Any = self.config.get_text_config(decoder=True)
        self.family = family_of(self.config)
        self.traits = ModelTraits.of(self.config)
        self.decoder, self.output_embeddings = decoder_and_head(self.model)
        if not hasattr(self.decoder, "layers") or self.output_embeddings is None:
            raise ModelError(
                f"{type(model).__name__} has no decoder layers; expected a causal language model or an "
                "image-text-to-text model of transformers."
            )
        if weights == INT8:
            round_weights(self.decoder, self.output_embeddings)
        self.layers: nn.ModuleList = self.decoder.layers
        self.ranks = Ranks.of(self.model) or OneProcess()  # processes over which the weights are split
        self.shards: Shards | None = getattr(self.decoder, HOLDER, None)
        self._embeddings: Any = self.model.get_input_embeddings()
        self.device: torch.device = compute_device(self._embeddings)
        if self._embeddings.weight.is_cuda:  # cuDNN's attention prepares a plan for every new number of entries
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.vocab_size: int = self.output_embeddings.weight.shape[0]
        base = getattr(self.model, "base_model", model)
        self._rope_index = getattr(base, "get_rope_index", None)
        self.has_rope_index = self._rope_index is not None  # whether positions are those of M-RoPE
        rope = getattr(self.text_config, "rope_parameters", None) or {}
        self.rope_axes = len(rope.get("mrope_section") or (0, 0, 0))  # axes of its positions
        self.layer_devices = [compute_device(layer) for layer in self.layers]
        self._rows_run_alone = self.traits.limits.longrope_threshold is not None
        self.layer_types = layer_types(self.text_config)
        self._recurrent = [i for i, kind in enumerate(self.layer_types) if kind in RECURRENT_TYPES]
        self._shapes = entry_shapes(self.text_config, len(self.layers))
        self._crossing = crossing_layers(self.text_config)
        # whether its layers read pictures beside the sequence (cross-attention)
        self._reads_beside = any("Cross" in type(module).__name__ for module in self.decoder.modules())
        if self._recurrent:
            wrap_functions(self.decoder)
        self.threads = StepThreads(())  # of its forwards; none to choose from
        self._stock_contexts = 0
        self._pinned: Executor | None = None  # `executor` in the context `pinned`
        self._found: Executor | None = None  # `executor` as of the last look
        self.looks = True  # whether forwards look for changes of the model
        self.exact = exact
        self.stock_modules = StockExecutor(self)
        self._fast: LeanExecutor | GraphExecutor | None = None  # beside the stock modules, if anything is
        self.chosen, self._is_named = chosen(executor), executor != "auto"
        if exact or (self.chosen != "stock" and self.traits.tested):
            self.use_fast()
        if self.chosen != "stock" and self._fast is None and self._base is None:
            self.stock_modules.pack()  # of an adapter, copies would be as large as the base

    @property
    def dtype(self) -> torch.dtype:
        """The weights' current dtype, which masks must share."""
        return self._embeddings.weight.dtype  # type: ignore[no-any-return]

    @property
    def executor(self) -> Executor:
        """What runs forwards now."""
        if self._fast is None or self._stock_contexts:
            return self.stock_modules
        if self._pinned is not None:
            return self._pinned
        return self._fast if self._fast.is_current else self.stock_modules

    @property
    def is_lean(self) -> bool:
        """Whether forwards run on fused weights."""
        return getattr(self.executor, "decoder", None) is not None

    @property
    def is_observed(self) -> bool:
        """Whether the stock modules run since their hooks are read."""
        return self._stock_contexts > 0

    @property
    def cache_shape(self) -> dict[str, Any]:
        """Arguments of a `RowCache` that follow from the model."""
        shape = {"layer_devices": self.layer_devices, "recurrent": self._recurrent, "shapes": self._shapes}
        return shape | {"crossing": self._crossing}

    @property
    def entry_bytes(self) -> int:
        """Bytes of one cache entry over all layers, by the configuration."""
        return self._bytes_of(self._shapes)

    def picture_bytes(self, prompt: Prompt) -> int:
        """Bytes that a prompt's pictures take in layers that attend to them alone; 0 without such layers."""
        if not self._crossing:
            return 0
        vision, shapes = self.config.vision_config, entry_shapes(self.text_config, len(self.layers), crossing=True)
        pictures = sum(medium.tensors["pixel_values"].shape[1] for medium in prompt.media)
        tokens = vision.max_num_tiles * ((vision.image_size // vision.patch_size) ** 2 + 1)
        return int(pictures * tokens * self._bytes_of(shapes))

    def _bytes_of(self, shapes: Sequence[tuple[int, int, int] | None]) -> int:
        shares = self.ranks.shares  # of the heads; every process has all of a single one
        elements = (max(heads // shares, 1) * (keys + values) for heads, keys, values in filter(None, shapes))
        return int(sum(elements) * self.dtype.itemsize)

    @property
    def has_states(self) -> bool:
        """Whether rows have recurrent states."""
        return bool(self._recurrent)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's recurrent states, those that are saved for later prompts included; 0 without such layers."""
        return self._state_bytes[0] * (1 + CHECKPOINTS)

    @property
    def pending_bytes(self) -> int:
        """Bytes of what recurrent layers hold of a token that waits to be committed."""
        return self._state_bytes[1]

    @cached_property
    def _state_bytes(self) -> tuple[int, int]:
        if not self._recurrent:
            return 0, 0
        cache = RowCache(self.layer_devices, 1, recurrent=self._recurrent)
        cache.reserve(0, 1)
        self.forward(cache, [TokenBlock([0], torch.zeros(1, 1, dtype=torch.long, device=self.device))])
        assert cache.states is not None
        return cache.states.nbytes, cache.states.pending_bytes

    @contextmanager
    def pinned(self, looks: bool = True) -> Iterator[None]:
        """Take the model as unchanged while the context is open, and unless it ``looks``, since the last look."""
        if looks or self.exact or self._found is None:
            self._found = self.executor
        elif isinstance(self._fast, GraphExecutor):
            self._fast.check_weights()
        self._pinned, self.looks = self._found, looks
        try:
            yield
        finally:
            self._pinned, self.looks = None, True

    @contextmanager
    def stock(self) -> Iterator[None]:
        """Run forwards through the stock modules, whose hooks fire, while the context is open."""
        self._stock_contexts += 1
        try:
            yield
        finally:
            self._stock_contexts -= 1

    @torch.inference_mode()
    def use_fast(self) -> None:
        """Take the fastest executor that fits the model and its device and gives the stock modules' logits.

        In exact mode `ModelError` is raised where none does.
        """
        for candidate in self._candidates():
            self._fast = candidate
            if gives_stock_logits(self):
                if isinstance(candidate, OpenVinoExecutor):  # which packs weights itself
                    candidate.decoder.unpack()
                break
            self._fast = None
        if self.exact and self._fast is None:
            raise ModelError(
                "The decoder of exact mode gives other logits than the model's own modules, or cannot add an adapter "
                "(DoRA) to its own; leave exact out."
            )
        if self.exact and not is_exact(self):
            raise ModelError(
                "Exact mode does not hold on this machine: a tree gives other bits than its tokens one by one; leave "
                "exact out, and please report processor and version of torch."
            )

    def _candidates(self) -> Iterator[LeanExecutor | GraphExecutor]:
        """Executors that fit the model, the fastest first."""
        kinds: Sequence[Any] = (OpenVinoExecutor, GraphExecutor)
        if self._base is not None:
            base = None if self._base._fast is None else self._base._fast.decoder
            decoder = None if base is None else base.adapted(self.model, self.decoder)
        else:
            decoder = exact_decoder(self, lean_decoder) if self.exact else lean_decoder(self.model, self.decoder)
        if decoder is None:
            kinds = kinds[1:] if self._base is None and self.stock_modules.repeats else ()
        for kind in kinds:
            if self.chosen in ("auto", kind.name) and (made := kind.of(self, decoder, self._is_named)) is not None:
                yield made
        if decoder is not None:
            yield LeanExecutor(self, decoder)

    def new_cache(self, rows: int, max_slots: int = sys.maxsize, in_levels: bool = False) -> RowCache:
        """Return an empty KV cache for up to ``rows`` rows; others as of `Executor`."""
        return (self._fast or self.stock_modules).new_cache(rows, max_slots, in_levels)

    def keep(self, cache: RowCache) -> None:
        """Take back a cache whose owner is gone."""
        (self._fast or self.stock_modules).keep(cache)

    @property
    def embedding_weight(self) -> Tensor:
        """Embeddings ``[V, d]`` of ids."""
        return self._embeddings.weight  # type: ignore[no-any-return]

    def embed(self, ids: Tensor) -> Tensor:
        """Return the decoder's embeddings ``[..., d]`` of ids."""
        return self._embeddings(ids)  # type: ignore[no-any-return]

    def lm_head(self, states: Tensor) -> Tensor:
        """Return the LM head's outputs ``[..., V]`` of states ``[..., d]`` after the final norm, in its dtype."""
        return self.executor.lm_head(states)

    def positions(self, ids: Tensor, prompt: Prompt) -> tuple[Tensor | None, int]:
        """M-RoPE positions ``[3, 1, S]`` of a prompt's ids ``[1, S]`` and its rope delta; (None, 0) without M-RoPE."""
        if self._rope_index is None:
            return None, 0
        if not prompt.media:
            places = torch.arange(ids.shape[1], device=ids.device)
            return places.expand(self.rope_axes, 1, -1), 0
        inputs = {"attention_mask": torch.ones_like(ids), **self.family.arguments(prompt)}
        if "video_second_per_grid" in inputs:  # the forward's name of it (Qwen-Omni)
            inputs["second_per_grids"] = inputs["video_second_per_grid"]
        names = inspect.signature(self._rope_index).parameters.keys() & inputs.keys()
        positions, _ = self._rope_index(ids, **{name: inputs[name].to(ids.device) for name in names})
        # as `generate` goes on; the model's own delta is after the last frame, which may come after the text's end
        offset = positions[:, 0, -1].max() + 1 - ids.shape[1]
        if offset != offset.round():
            raise InputError(
                "After this video the model counts positions in fractions; sample it so that its frames are a whole "
                "number of positions apart, for example 2 frames per second."
            )
        return positions, int(offset)

    def media_inputs(self, prompt: Prompt) -> dict[str, Any]:
        """Arguments of the stock model for a row's media and token types, on its device and in its dtype."""
        return {
            name: to_device(value.to(self.dtype) if value.is_floating_point() else value, self.device)
            for name, value in self.family.arguments(prompt).items()
        }

    # -- forwards ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self, cache: RowCache, blocks: Sequence[TokenBlock], requirements: Requirements | None = None
    ) -> list[ForwardOutput]:
        """Run new tokens of some rows after their committed and pending entries, as one packed sequence.

        Models that cannot run such a sequence run one row after the other, as do those with a longrope embedding, whose
        factors follow from the longest row of a pass.
        """
        requirements, executor = requirements or Requirements(), self._running
        if not self._rows_run_alone:
            return executor.forward(cache, blocks, requirements)
        outputs = []
        for block in blocks:
            rows = [executor.forward(cache, [single], requirements)[0] for single in block.split_rows()]
            outputs.append(concat_outputs(rows))
        return outputs

    @property
    def _running(self) -> Executor:
        executor = self.executor
        if self.exact and executor is self.stock_modules and not self._stock_contexts:
            raise ModelError(
                "The model was changed after it was loaded in exact mode (a hook, a cast, or other modules), which its "
                "decoder cannot follow; undo that, or load it again."
            )
        return executor

    @torch.inference_mode()
    def early_exit(self, cache: RowCache, block: TokenBlock, layer: int) -> Tensor:
        """Run `forward` up to the input of ``layer``, ``[A, n, d]``.

        Entries of later layers are not written, so these pending entries can only be dropped.
        """
        if self._rows_run_alone:
            return torch.cat([self.executor.early_exit(cache, single, layer) for single in block.split_rows()])
        return self.executor.early_exit(cache, block, layer)

    @torch.inference_mode()
    def run_ahead(self, cache: RowCache, first: Sequence[int], ahead: Ahead) -> Tensor | None:
        """As of `Executor`."""
        return None if self._rows_run_alone else self._running.run_ahead(cache, first, ahead)

    @torch.inference_mode()
    def forward_prompt(self, cache: RowCache, row: int, prompt: Prompt, requirements: Requirements) -> ForwardOutput:
        """Run a whole prompt with its raw media through the stock model into an empty row; its entries are pending.

        For families whose placeholders are unknown; `InputError` and `ModelError` as the model raises them.
        """
        ids = torch.tensor([prompt.ids], device=self.device)
        self.plan(cache, [TokenBlock([row], ids, logits_from=len(prompt) - 1, chain=len(prompt))])
        inputs = self.media_inputs(prompt)
        inputs.update(attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True, logits_to_keep=1)
        positions, _ = self.positions(ids, prompt)
        if positions is not None:
            inputs["position_ids"] = positions
        elif self.traits.bidirectional_prompts:  # PaliGemma itself would count from 1
            places = torch.arange(len(prompt), device=self.device)
            inputs["position_ids"] = places[None]
        layers = {*requirements.layers, *range(requirements.embeddings)}  # 0: what the decoder reads
        with captured_states(self, sorted(layers), requirements.final) as hidden:
            output = self.model(input_ids=ids, **inputs)
        if self._reads_beside:
            cache.carried[row] = self._carried(output, ids, inputs)
        return ForwardOutput(output.logits[:, -1:], hidden)

    def _carried(self, output: Any, ids: Tensor, inputs: dict[str, Any]) -> Carried:
        """What `generate` passes with the next token after a prompt, besides what all models take."""
        given = {name: value for name, value in inputs.items() if name not in _STOCK_INPUTS}
        later = self.model._update_model_kwargs_for_generation(output, dict(given), is_encoder_decoder=False)
        later.update(past_key_values=None, use_cache=True)
        step = self.model.prepare_inputs_for_generation(pad(ids, (0, 1)), next_sequence_length=1, **later)
        carried = Carried()
        for name, value in step.items():
            if name in _STOCK_INPUTS or not isinstance(value, Tensor):
                continue
            is_per_token = name in given and given[name].shape[1] == ids.shape[1]
            if is_per_token and value.shape[1] == 1:
                carried.each[name] = value
            else:
                carried.fixed[name] = value
        return carried

    def embedded(self, blocks: Sequence[TokenBlock]) -> Tensor:
        """``[T, d]`` decoder inputs of a packed sequence."""
        parts = []
        for block in blocks:
            embeddings = self.embed(block.tokens) if block.embeddings is None else block.embeddings
            parts.append(embeddings.flatten(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # -- layout, masks and positions -----------------------------------------------------------------------

    def plan(self, cache: RowCache, blocks: Sequence[TokenBlock]) -> tuple[Layout, Tensor, Tensor | None]:
        """Layout, positions ``[3 or 1, T]``, and indices of the tokens whose logits are computed (None: all)."""
        positions, parts, last = self.positions_of(cache, blocks), [], 0
        has_logits_of_all = True
        for block in blocks:
            lengths, count = list(map(cache.lengths.__getitem__, block.rows)), block.count
            pending = cache.pending[block.rows[0]]
            longest = max(map(add, lengths, block.rope_deltas or [0] * len(block.rows)))
            last = max(last, longest + pending + count - 1) if block.positions is None else sys.maxsize
            has_logits_of_all &= not block.logits_from
            masks = self.traits.masks.build(
                lengths,
                count,
                dtype=self.dtype,
                device=self.device,
                pending=pending,
                attention_mask=block.attention_mask,
                depth=block.depth,
                slot_shifts=block.slot_shifts,
            )
            parts.append((block.rows, count, masks))
        layout = cache.plan_layout(parts)
        layout.last = None if last == sys.maxsize else last
        if cache.states is not None:
            cache.states.plan(
                [(b.rows, b.count, b.attention_mask, b.chain, cache.pending[b.rows[0]] - b.count) for b in blocks],
                self.device,
            )
        cache.positions = positions
        if has_logits_of_all:
            return layout, positions, None
        indices, start = [], 0
        for block in blocks:
            stop = start + block.tokens.numel()
            each = torch.arange(start, stop, device=self.device).view(-1, block.count)
            indices.append(each[:, block.logits_from :].flatten())
            start = stop
        return layout, positions, indices[0] if len(indices) == 1 else torch.cat(indices)

    def positions_of(self, cache: RowCache, blocks: Sequence[TokenBlock]) -> Tensor:
        """Position ids ``[3 or 1, T]`` of a packed sequence."""
        if len(blocks) == 1:
            return self.place(cache, blocks[0]).flatten(1)
        parts = [self.place(cache, block).flatten(1) for block in blocks]
        if len({part.shape[0] for part in parts}) > 1:  # text beside a prompt with M-RoPE positions
            parts = [part.expand(self.rope_axes, -1) for part in parts]
        return torch.cat(parts, 1)

    def place(self, cache: RowCache, block: TokenBlock) -> Tensor:
        """Position ids ``[3 or 1, A, n]`` of a block's tokens."""
        if block.positions is not None:
            return block.positions
        count, rows, depth = block.count, block.rows, block.depth
        deltas = block.rope_deltas or [0] * len(rows)
        lengths = list(map(cache.lengths.__getitem__, rows))
        first = list(map(add, lengths, deltas))
        longest, pending = max(first), cache.pending[rows[0]]
        is_even, end = min(first) == longest, longest + pending + count
        holds = self.traits.limits.holds(end)
        if depth is None:
            if is_even and holds:
                return torch.arange(end - count, end, device=self.device).expand(1, len(rows), -1)
            depth = torch.arange(pending, pending + count, device=self.device)[None]
        depth = depth[:, depth.shape[1] - count :]
        if is_even:
            positions = (depth + first[0]).expand(len(rows), -1)
        else:
            positions = depth + cache.numbers.get(first).to(self.device)[:, None]
        ahead = None
        if max(deltas) > 0 and not holds:
            ahead = cache.numbers.get(deltas).to(self.device)[:, None]
        return positions[None] if holds else self.traits.limits.clamp_positions(positions, lengths, ahead)[None]
