"""What a head learns from one sample: the target's states, read in one pass without gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from saccade.inputs.batch import media_spans, visual_mask
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.features import FeatureTap
from saccade.train.collate import forward_passes
from saccade.train.samples import Sample


@dataclass(frozen=True, slots=True)
class Features:
    """What the target made of one sample of S tokens.

    The teacher's logits are not kept: the LM head makes them of the last states.

    Attributes:
        ids: ``[S]``.
        visual: ``[S]`` bool; placeholders of images and videos.
        answer: ``[S]`` bool; tokens whose NEXT token is part of the answer. The prompt's last token is one of them,
            the answer's last token is not.
        states: layer index -> ``[S, d]``; the index behind the last layer is there, after the final norm.
        embeddings: ``[S, d]`` what the decoder was given: the visual features in place of placeholders.
        dropped: ``[S]`` bool; visual tokens that the head is not shown; None for none.
        stops: tokens behind images and videos.
    """

    ids: Tensor
    visual: Tensor
    answer: Tensor
    states: dict[int, Tensor]
    embeddings: Tensor
    dropped: Tensor | None = None
    stops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Needed:
    """What a head reads of one sample, by token.

    Attributes:
        states: layer index -> ``[S]`` bool; tokens whose state is read.
        visual: ``[S]`` bool; visual tokens whose embedding is read. Embeddings of text are looked up.
    """

    states: dict[int, Tensor]
    visual: Tensor


def read_features(target: Target, samples: Sequence[Sample], layers: Sequence[int]) -> list[Features]:
    """Run the target over prompts and answers: together where its family is known and their media fit together.

    Args:
        layers: which states are wanted besides the last, as in `saccade.target.features.FeatureTap`.
    """
    wanted = sorted({0, *layers, len(target.layers)})
    read: list[Features] = []
    for part, inputs in forward_passes(target, [Prompt(s.ids, s.prompt.media) for s in samples]):
        with torch.no_grad(), FeatureTap(target, wanted) as tap, _given(target) as given:
            target.model(**inputs, use_cache=False, logits_to_keep=1)
        embeddings = given[0] if given else tap.hidden[0]
        for row, sample in enumerate(samples[part]):
            states = {layer: h[row, : len(sample.ids)] for layer, h in tap.hidden.items()}
            read.append(_row(target, sample, layers, states, embeddings[row, : len(sample.ids)]))
    return read


@contextmanager
def _given(target: Target) -> Iterator[list[Tensor]]:
    """What the decoder is given while this is open, ``[B, S, d]``: as heads are given it when they draft, before
    anything that the decoder itself makes of it (Granite multiplies it by a number)."""
    found: list[Tensor] = []

    def keep(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given, ids = kwargs.get("inputs_embeds"), kwargs.get("input_ids")
        if given is None and ids is not None:
            given = target.model.get_input_embeddings()(ids)
        if given is not None:
            found.append(given.to(target.device))

    handle = target.decoder.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()


def answer_mask(prompt: int, length: int) -> Tensor:
    """``[length]`` bool: tokens whose next token belongs to the answer that follows ``prompt`` tokens."""
    places = torch.arange(length)
    return (places >= prompt - 1) & (places < length - 1)


def _row(
    target: Target, sample: Sample, layers: Sequence[int], states: dict[int, Tensor], embeddings: Tensor
) -> Features:
    ids = torch.tensor(sample.ids, device=target.device)
    spans = media_spans(target.config, sample.prompt) if sample.prompt.media else []
    return Features(
        ids=ids,
        visual=visual_mask(target.config, ids),
        answer=answer_mask(len(sample.prompt), len(ids)).to(target.device),
        states={layer: states[layer] for layer in {*layers, len(target.layers)}},
        embeddings=embeddings,
        stops=tuple(stop for _, stop in spans),
    )
