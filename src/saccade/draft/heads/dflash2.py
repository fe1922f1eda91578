"""DFlash 2's head: DFlash's with convolutions along the block, and candidates judged by the token before them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.draft.heads.dflash import DFlash, DFlashBlock
from saccade.draft.heads.head import HeadConfig, Placement
from saccade.errors import ModelError


class DynamicConvolution(nn.Module):
    """Causal convolutions along a block, of what enters a sublayer and of what leaves it.

    A channel's taps are a kernel of its own plus numbers that its group of channels shares, which a linear layer
    computes at every token from what enters. New ones change nothing.
    """

    __call__: Callable[..., Tensor]

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        options, width = config.options, config.hidden_size
        taps, self._group = options["conv_kernel_size"], options["conv_group_size"]
        self._block, self._sizes = options["block"], (2, taps, width // self._group)
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, math.prod(self._sizes), bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """The sublayer's convolved output ``[B, N, d]`` of the convolved ``x``; both are whole blocks in a row."""
        dynamic = self.kernel_projection(x).unflatten(-1, self._sizes).repeat_interleave(self._group, -1)
        entering, leaving = (self.base_kernel + dynamic).unbind(2)  # [B, N, K, d]
        return self._convolved(sublayer(self._convolved(x, entering)), leaving)

    def _convolved(self, x: Tensor, taps: Tensor) -> Tensor:
        """Tap k ``[B, N, k, d]`` weighs the token k places before, in the same block."""
        blocks = x.unflatten(1, (-1, self._block))
        earlier = torch.stack([F.pad(blocks, (0, 0, k, -k)) for k in range(taps.shape[2])], 3)
        return (earlier.flatten(1, 2) * taps).sum(2)


class DFlash2Block(DFlashBlock):
    """DFlash's draft layer with convolutions around its attention and its MLP; the context's features have none."""

    def __init__(self, config: HeadConfig, place: int) -> None:
        super().__init__(config, place)
        self.attention_conv = DynamicConvolution(config)
        self.mlp_conv = DynamicConvolution(config)

    def forward(
        self, x: Tensor, at: Placement, features: Tensor | None = None, over: Placement | None = None
    ) -> Tensor:
        x = x + self.attention_conv(self.input_layernorm(x), lambda normed: self.attend(normed, at, features, over))
        return x + self.mlp_conv(self.post_attention_layernorm(x), lambda normed: self.mlp(normed, at.cache))


class CandidateSelector(nn.Module):
    """Scores a slot's candidates by the sum over r of ``before[token, r] * (P state)[r] * after[candidate, r]``."""

    __call__: Callable[..., Tensor]

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        rank = config.options["selector_rank"]
        self.predecessor_codebook = nn.Parameter(0.02 * torch.randn(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(0.02 * torch.randn(config.vocab_size, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(self, hidden: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """Scores ``[A, W, K]`` of candidates ``[A, K]`` after tokens ``[A, W]``, of a slot's state ``[A, 1, d]``."""
        context = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        scores: Tensor = context @ self.successor_codebook[candidates].mT
        return scores


class DFlash2(DFlash):
    """DFlash with convolutions and a candidate selector (DFlash 2, z-lab).

    The ``selector_top_k`` likeliest tokens of a slot are its candidates. The token before the slot adds to their
    logits; other tokens are not drafted.
    """

    kind: ClassVar[str] = "dflash2"
    defaults: ClassVar[Mapping[str, Any]] = {
        **DFlash.defaults,
        **DFlash.choices,
        "conv_kernel_size": 2,  # tokens that a convolution reads, the own one included
        "conv_group_size": 16,  # channels that share the computed part of a kernel
        "selector_rank": 256,
        "selector_top_k": 16,  # candidates of a slot
    }

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        if config.hidden_size % config.options["conv_group_size"]:
            raise ModelError(
                f"conv_group_size must divide the width of the head, {config.hidden_size}, "
                f"not {config.options['conv_group_size']}."
            )
        self.candidate_selector = CandidateSelector(config)

    @staticmethod
    def bounds(config: HeadConfig) -> dict[str, tuple[int, int]]:
        most = {
            "conv_kernel_size": config.options["block"],
            "conv_group_size": config.hidden_size,
            "selector_rank": 1 << 16,
            "selector_top_k": config.vocab_size,
        }
        return {**DFlash.bounds(config), **{name: (1, size) for name, size in most.items()}}

    def new_block(self, place: int) -> DFlashBlock:
        return DFlash2Block(self.config, place)

    def corrected(self, logits: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
        """Return the logits ``[A, W, V]`` of a slot after the tokens ``before`` ``[A, W]``; -inf but for candidates.

        Shapes: logits ``[A, 1, V]``; hidden ``[A, 1, d]``.
        """
        values, candidates = logits.topk(self.config.options["selector_top_k"])
        scores = values + self.candidate_selector(hidden, before, candidates[:, 0]).to(values)
        none = logits.new_full((1, 1, 1), -torch.inf).expand(*before.shape, logits.shape[-1])
        return none.scatter(-1, candidates.expand_as(scores), scores)

    def selection(self, logits: Tensor, hidden: Tensor, before: Tensor, wanted: Tensor) -> Tensor:
        """Return the cross entropy ``[M]`` of the token ``wanted`` among the candidates, of which it is made one.

        Shapes: logits ``[M, V]``; hidden ``[M, 1, d]``; before ``[M, 1]``; wanted ``[M]``.
        """
        first = logits.detach().scatter(-1, wanted[:, None], torch.inf)
        candidates = first.topk(self.config.options["selector_top_k"]).indices
        added = self.candidate_selector(hidden, before, candidates)[:, 0]
        return -(logits.gather(-1, candidates) + added).log_softmax(-1)[:, 0]
