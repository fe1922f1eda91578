"""Prompts: token ids with placeholders, the media that fill them, and digests of these."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class Medium:
    """One image or one video, ready for one model family."""

    kind: Literal["image", "video"]  # which placeholder token it fills
    # forward keyword arguments for this medium alone, batch dimension included (for example `pixel_values` and
    # `image_grid_thw`)
    tensors: Mapping[str, torch.Tensor] = field(compare=False, hash=False)
    n_tokens: int  # number of placeholder tokens in the prompt that it fills
    digest: str  # hash of the content; equal digests mean interchangeable features
    frame: tuple[int, int] | None = None  # index and number of frames

    @property
    def is_of_video(self) -> bool:
        """Whether it is a video or a frame of one."""
        return self.kind == "video" or self.frame is not None


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row's prompt for one model."""

    ids: tuple[int, ...]  # token ids, placeholders already expanded to one id per visual token
    # the media in the order in which their placeholders appear in `ids`
    media: tuple[Medium, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sources(self) -> list[tuple[Medium, ...]]:
        """Media by source: the frames of one video together, all others alone."""
        sources: list[tuple[Medium, ...]] = []
        for medium in self.media:
            if medium.frame is not None and medium.frame[0] and sources:
                sources[-1] = (*sources[-1], medium)
            else:
                sources.append((medium,))
        return sources

    def salted(self, salt: str) -> Prompt:
        """The same prompt, whose media share features and captions with those of the same salt alone."""
        return replace(self, media=tuple(replace(m, digest=f"{m.digest}/{salt}") for m in self.media))


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash tensors by name, dtype, shape and bytes (BLAKE2b, 32 hex digits).

    ``batch_num_images`` counts as one or several: LLaVA-OneVision tiles an image only when it is alone, how many
    others there are makes no difference, and a conversation that gains an image keeps its earlier ones.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        if name == "batch_num_images":
            tensor = tensor.clamp(max=2)
        hasher.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
