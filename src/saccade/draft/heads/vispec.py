"""ViSpec's head, with images compressed to a few entries and one global vector, and its draft session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.draft.heads.dream import CrossBlock
from saccade.draft.heads.head import LARGEST, Block, Head, HeadConfig, Placement, RMSNorm, Step, decoupled
from saccade.draft.heads.session import HeadDrafter, HeadEntries
from saccade.inputs.families.family import Prompt
from saccade.target_model.context import Context, PrefillResult
from saccade.tree import Rows


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
        anywhere = Placement(torch.zeros(1, 1))  # there are no positions
        out: Tensor = self.cross(self.queries[None].to(tokens.dtype), tokens[None], anywhere, anywhere)[0]
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
    """

    kind: ClassVar[str] = "vispec"
    defaults: ClassVar[Mapping[str, Any]] = {
        "queries": 2,  # vectors per image, the last one included; 2 as released
        # Released: no norms of the inputs and before the block's attention, the global vector mixed into the feature by
        # a layer of its own, an adaptor without norms and MLP, and token positions.
        "form": ("normed", "released"),
        "bias": (False, True),  # of the layers that mix, in the released form
    }
    loaded_only: ClassVar[tuple[str, ...]] = ("form", "bias")

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        width, queries = config.hidden_size, config.options["queries"]
        self.is_released = config.options["form"] == "released"
        self.positions = "tokens" if self.is_released else "entries"
        self.shown = queries - 1  # entries per image of at least as many tokens
        self.adaptor = (ReleasedAdaptor if self.is_released else Adaptor)(config, queries)
        if self.is_released:
            self.image_fc = nn.Linear(2 * width, width, bias=config.options["bias"])
            self.fc = nn.Linear(2 * width, width, bias=config.options["bias"])
        else:
            self.embedding_norm = RMSNorm(width, config.norm_eps)
            self.feature_norm = RMSNorm(width, config.norm_eps)
            self.fc = nn.Linear(2 * width, width, bias=False)
            self.told = nn.Linear(width, width, bias=False)  # projects the global vector; saved as told
        self.block = Block(config, normed=not self.is_released)

    @staticmethod
    def bounds(config: HeadConfig) -> dict[str, tuple[int, int]]:
        return {"queries": (2, LARGEST)}

    def entries(self, visual: Tensor, stops: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        seen = ~visual
        for first, stop in runs_of(visual, stops):
            seen[max(first, stop - self.shown) : stop] = True
        tokens = seen.nonzero()[:, 0]
        tokens = tokens[tokens > 0]
        return decoupled(visual, tokens, tokens - 1)

    def embed(self, embeddings: Tensor, visual: Tensor, stops: Sequence[int] = ()) -> Tensor:
        """Return inputs ``[E, 2 * d]`` of `with_images`."""
        inputs = embeddings.to(self.adaptor.queries.dtype)
        images = [Image(first, stop, self.adaptor(inputs[first:stop])) for first, stop in runs_of(visual, stops)]
        tokens = self.entries(visual, stops)[0]
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
            mixed = self.image_fc(torch.cat([features, global_vectors], -1))
            both = self.fc(torch.cat([words, mixed], -1))
        else:
            words = self.embedding_norm(words)
            both = self.fc(torch.cat([words, self.feature_norm(features)], -1)) + self.told(global_vectors)
        return self.block(torch.where(features.any(-1, keepdim=True), both, words.to(both.dtype)), at)


def runs_of(visual: Tensor, cuts: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Return the first token and the one after the last of every run of visual tokens; ``cuts`` begin new ones.

    Shapes: visual ``[S]``.
    """
    seen, count = [False, *visual.tolist(), False], len(visual)  # token t at t + 1
    firsts = [token for token in range(count) if seen[token + 1] and (not seen[token] or token in cuts)]
    stops = [token for token in range(1, count + 1) if seen[token] and (not seen[token + 1] or token in cuts)]
    return list(zip(firsts, stops, strict=True))


class ViSpecEntries(HeadEntries):
    """Entries with the vectors of a row's images in their inputs."""

    def __init__(self, drafter: HeadDrafter, rows: int, context: Context) -> None:
        super().__init__(drafter, rows, context)
        self._vispec = cast("ViSpec", drafter.head)
        self._images: list[list[Image]] = [[] for _ in range(rows)]
        self._global = self.like.new_zeros(rows, drafter.head.config.hidden_size)

    def prompt_inputs(self, row: int, prompt: Prompt, prefill: PrefillResult, tokens: Tensor) -> Tensor:
        start = prefill.start
        images = [image for image in self._images[row] if image.stop <= start]
        runs = [run for run in runs_of(self.visual(prompt), self.stops(prompt)) if run[1] > start]
        if runs:
            inputs = self.decoder_inputs(prefill).to(self.like)
            images += [Image(a, b, self._vispec.adaptor(inputs[a - start : b - start])) for a, b in runs]
        self._images[row] = images
        self._global[row] = images[-1].vectors[-1] if images else 0
        places = tokens.to(self.device)
        words = self.words(torch.tensor(prompt.ids, device=self.device)[places])
        return self._vispec.with_images(words, places, images)[None]

    def inputs(self, rows: Rows, tokens: Tensor) -> Tensor:
        vectors = self._global[self.numbers.get(rows)]
        return torch.cat([self.words(tokens), vectors[:, None].expand(-1, tokens.shape[1], -1)], -1)
