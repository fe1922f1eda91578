"""ViSpec's head, with images compressed to a few entries and one global vector, and its draft session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.draft.heads.block import Block, Placement, RMSNorm
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.dream import CrossBlock
from saccade.draft.heads.head import Head, Step, decoupled
from saccade.draft.heads.session import HeadDrafter, HeadDraftSession
from saccade.errors import ModelError
from saccade.inputs.families import media_spans
from saccade.inputs.families.family import Prompt
from saccade.target_model.context import Context, PrefillResult


@dataclass(frozen=True, slots=True)
class Image:
    """A compressed image."""

    first: int  # its first token
    stop: int  # the token after its last one
    vectors: Tensor  # `[queries, d]`; the last one is the global vector for later text


class Adaptor(nn.Module):
    """Learned queries attend to an image's tokens (ViSpec, Section 3.2)."""

    def __init__(self, config: HeadConfig, queries: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, config.hidden_size))
        self.cross = CrossBlock(config, "replace", 0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors ``[queries, d]`` of an image's decoder inputs ``[N, d]``."""
        queries = self.queries[None].to(tokens.dtype)
        reach = torch.ones(1, queries.shape[1], len(tokens), dtype=torch.bool, device=tokens.device)
        out: Tensor = self.cross(queries, tokens[None], reach)[0]
        return out


class ReleasedAdaptor(nn.Module):
    """The adaptor as ViSpec was released: attention of learned queries, without norms and MLP."""

    def __init__(self, config: HeadConfig, queries: int) -> None:
        super().__init__()
        width = config.hidden_size
        self._heads = config.heads
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.k_proj = nn.Linear(width, width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors ``[queries, d]`` of an image's decoder inputs ``[N, d]``."""
        parts = (self.queries.to(tokens.dtype), self.k_proj(tokens), self.v_proj(tokens))
        q, k, v = (part.unflatten(-1, (self._heads, -1)).transpose(0, 1)[None] for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v)[0]  # [heads, queries, d / heads]
        out: Tensor = self.o_proj(mixed.transpose(0, 1).flatten(1))
        return out


class ViSpec(Head):
    """EAGLE-2's head with images compressed (Kang et al. 2025, ViSpec, Sections 3.2 and 3.3).

    All but the last of an image's vectors replace its last tokens; its other tokens have no entry. These entries have
    no feature (zero). The last vector, the global one, is mixed into the input of every later text token, draft tokens
    included, up to the next image. An image is a run of visual tokens; so is a video. Positions count entries, whereas
    the paper keeps token positions, which differ by the tokens left out before an entry.

    Options:
        queries: vectors per image, the last one included; 2 as released.
        form: ``normed``, or ``released``: no norms of the inputs and before the block's attention, the global vector
            mixed into the feature by a layer of its own, an adaptor without norms and MLP, and token positions.
        bias: of the layers that mix, in the released form.
    """

    kind: ClassVar[str] = "vispec"
    defaults: ClassVar[Mapping[str, Any]] = {"queries": 2, "form": "normed", "bias": False}
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {"form": ("normed", "released"), "bias": (False, True)}
    loaded_only: ClassVar[tuple[str, ...]] = ("form", "bias")

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width, queries = config.hidden_size, config.options["queries"]
        if queries < 2:
            raise ModelError(f"A vispec head needs at least 2 queries, not {queries}.")
        self.is_released = config.options["form"] == "released"
        if self.is_released:
            bias = config.options["bias"]
            self.adaptor: Adaptor | ReleasedAdaptor = ReleasedAdaptor(config, queries)
            self.image_fc = nn.Linear(2 * width, width, bias=bias)
            self.fc = nn.Linear(2 * width, width, bias=bias)
            self.block = Block(config, normed=False)
            return
        self.adaptor = Adaptor(config, queries)
        self.embedding_norm = RMSNorm(width, config.norm_eps)
        self.feature_norm = RMSNorm(width, config.norm_eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.told = nn.Linear(width, width, bias=False)  # projects the global vector; saved as told
        self.block = Block(config)

    @property
    def shown(self) -> int:
        """Entries per image of at least as many tokens."""
        return int(self.config.options["queries"]) - 1

    def entries(self, visual: Tensor, stops: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        return self.entries_of(visual, runs_of(visual, stops))

    def entries_of(self, visual: Tensor, runs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """As `entries`, with the images as runs of `runs_of`."""
        seen = ~visual
        for first, stop in runs:
            seen[max(first, stop - self.shown) : stop] = True
        tokens = seen.nonzero()[:, 0]
        tokens = tokens[tokens > 0]
        return decoupled(visual, tokens, tokens - 1)

    def embed(self, embeddings: Tensor, visual: Tensor, stops: Sequence[int] = ()) -> Tensor:
        """Return inputs ``[E, 2 * d]`` of `with_images`."""
        inputs, runs = embeddings.to(self.adaptor.queries.dtype), runs_of(visual, stops)
        images = [Image(first, stop, self.adaptor(inputs[first:stop])) for first, stop in runs]
        tokens = self.entries_of(visual, runs)[0]
        return self.with_images(inputs[tokens], tokens, images)

    def with_images(self, words: Tensor, tokens: Tensor, images: Sequence[Image]) -> Tensor:
        """Return the entries' inputs ``[E, 2 * d]``: own vector and global vector of the latest image before them.

        Shapes: words ``[E, d]``; tokens ``[E]``.
        """
        global_vectors = torch.zeros_like(words)
        for image in images:
            shown = min(self.shown, image.stop - image.first)
            number = tokens - (image.stop - shown)
            inside = (number >= 0) & (number < shown)
            words = torch.where(inside[:, None], image.vectors[number.clamp(0, shown - 1)], words)
            global_vectors = torch.where((tokens >= image.stop)[:, None], image.vectors[-1], global_vectors)
        return torch.cat([words, global_vectors], -1)

    def forward(self, features: Tensor, embeddings: Tensor, at: Placement, step: Step = 0) -> Tensor:
        """As `Head.forward`, with embeddings ``[B, N, 2 * d]`` of `with_images`."""
        words, global_vectors = embeddings.chunk(2, -1)
        if self.is_released:
            features = torch.where(
                features.any(-1, keepdim=True), self.image_fc(torch.cat([features, global_vectors], -1)), 0
            )
            both = self.fc(torch.cat([words, features], -1))
            joint: Tensor = self.block(torch.where(features.any(-1, keepdim=True), both, words.to(both.dtype)), at)
            return joint
        words = self.embedding_norm(words)
        both = self.fc(torch.cat([words, self.feature_norm(features)], -1)) + self.told(global_vectors)
        fused = torch.where(features.any(-1, keepdim=True), both, words.to(both.dtype))
        out: Tensor = self.block(fused, at)
        return out


def runs_of(visual: Tensor, cuts: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Return the first token and the one after the last of every run of visual tokens.

    Shapes: visual ``[S]``.
    """
    flags, runs, first, ends = visual.tolist(), list[tuple[int, int]](), -1, set(cuts)
    for token, seen in enumerate([*flags, False]):
        if first >= 0 and (not seen or token in ends):
            runs.append((first, token))
            first = -1
        if seen and first < 0:
            first = token
    return runs


class ViSpecDraftSession(HeadDraftSession):
    """Draft session of a ViSpec head."""

    def __init__(self, drafter: HeadDrafter, rows: int, target: Context) -> None:
        super().__init__(drafter, rows, target)
        assert isinstance(drafter.head, ViSpec)
        self._vispec = drafter.head
        self._images: list[list[Image]] = [[] for _ in range(rows)]
        self._global = self._features[0].new_zeros(rows, self._features[0].shape[1])

    def forget(self, row: int) -> None:
        super().forget(row)
        self._images[row] = []

    def _place(self, row: int, prompt: Prompt, tokens: Tensor) -> None:
        if self._vispec.is_released:
            self._ahead[row] = len(prompt) - 1 - len(tokens)

    def _places(self, row: int, tokens: Tensor) -> Tensor:
        if self._vispec.is_released:
            return (tokens.to(self._device) - 1)[None]
        return super()._places(row, tokens)

    def _runs(self, prompt: Prompt) -> Sequence[tuple[int, int]]:
        # A later turn may start between two adjacent images: each is compressed separately.
        spans = media_spans(self._drafter.target.config, prompt)
        return runs_of(self._visual(prompt), [stop for _, stop in spans])

    def _entries(self, row: int, prompt: Prompt, prefill: PrefillResult) -> tuple[Tensor, Tensor]:
        return self._vispec.entries_of(self._visual(prompt), self._runs(prompt))

    def _embedded(self, row: int, prompt: Prompt, prefill: PrefillResult, tokens: Tensor) -> Tensor:
        start = prefill.start
        images = [image for image in self._images[row] if image.stop <= start]
        runs = [(first, stop) for first, stop in self._runs(prompt) if stop > start]
        if runs:
            inputs = self._inputs(prefill).to(self._features[0])
            images += [Image(a, b, self._vispec.adaptor(inputs[a - start : b - start])) for a, b in runs]
        self._images[row] = images
        self._global[row] = images[-1].vectors[-1] if images else 0
        places = tokens.to(self._device)
        words = self._words(torch.tensor(prompt.ids, device=self._device)[places])
        return self._vispec.with_images(words, places, images)[None]

    def _embed(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        vectors = self._global[self._numbers.get(rows)]
        return torch.cat([self._words(tokens), vectors[:, None].expand(-1, tokens.shape[1], -1)], -1)
