"""Target states that a head is trained on, and DREAM's calibration of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from saccade.draft.pruning import Pruning
from saccade.errors import InputError, ModelError
from saccade.inputs.families import family_of
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.target_model.stock import AttentionProbe, captured_states
from saccade.train.data import TrainingSample


@dataclass(frozen=True, slots=True)
class Features:
    """Target outputs for one sample of S tokens.

    Without the teacher's logits, which the LM head computes from the last states.
    """

    ids: Tensor  # `[S]`
    visual: Tensor  # `[S]` bool; placeholders of images and videos
    answer: Tensor  # `[S]` bool
    states: dict[int, Tensor]  # layer index -> `[S, d]`
    embeddings: Tensor  # `[S, d]` decoder inputs, with visual features in place of placeholders
    dropped: Tensor | None = None  # `[S]` bool; visual tokens without entries; None for none
    stops: tuple[int, ...] = ()  # tokens after images and videos


@dataclass(frozen=True, slots=True)
class Needed:
    """Part of a sample that a head reads, by token."""

    states: dict[int, Tensor]  # layer index -> `[S]` bool; tokens whose state is read
    visual: Tensor  # `[S]` bool; visual tokens whose embedding is read. Embeddings of text are looked up


def forward_inputs(target: Target, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Keyword arguments of the target's model for B sequences and their media.

    Shapes: returns ``[B, S]``.
    """
    device = target.device
    rows = [torch.tensor(p.ids, device=device) for p in prompts]
    # Padding repeats a row's last token: unlike an arbitrary id, it can never be a placeholder.
    longest = max(map(len, rows))
    padded = [torch.cat([row, row[-1:].expand(longest - len(row))]) for row in rows]
    ids = torch.stack(padded)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": (torch.arange(longest, device=device) < lengths[:, None]).long(),
        **target.family.type_ids(ids),
    }
    for name, value in family_of(target.config).collate([p.media for p in prompts]).items():
        inputs[name] = value.to(device, target.dtype if value.is_floating_point() else None)
    known = []
    for row, prompt in zip(rows, prompts, strict=True):
        positions, _ = target.positions(row[None], prompt)
        if positions is not None:
            known.append(positions[:, 0].T)
    if known:
        inputs["position_ids"] = pad_sequence(known, batch_first=True).permute(2, 0, 1)
    return inputs


def forward_passes(target: Target, prompts: Sequence[Prompt]) -> Iterator[tuple[slice, dict[str, Any]]]:
    """Forward passes for all prompts in order: halved where media do not fit together (videos of several lengths).

    Prompts of an unknown family are passed one at a time.
    """
    waiting = [(0, len(prompts))]
    while waiting:
        start, end = waiting.pop()
        try:
            inputs = forward_inputs(target, prompts[start:end])
        except InputError:
            if end - start <= 1:
                raise
            middle = start + (end - start) // 2
            waiting += [(middle, end), (start, middle)]
            continue
        yield slice(start, end), inputs


def extract_features(target: Target, samples: Sequence[TrainingSample], layers: Sequence[int]) -> list[Features]:
    """Run the target over prompts and answers, in batches where family and media allow."""
    wanted = sorted({*layers, len(target.layers)})
    extracted: list[Features] = []
    for part, inputs in forward_passes(target, [Prompt(s.ids, s.prompt.media) for s in samples]):
        with torch.no_grad(), captured_states(target, wanted) as hidden, _captured_inputs(target) as embedded:
            last = torch.tensor([-1], device=target.device)  # by the number 1, Gemma 4 skips states of other tokens
            target.model(**inputs, use_cache=False, logits_to_keep=last)
        if not embedded:
            raise ModelError(
                f"{type(target.decoder).__name__} gets no embeddings in a known way, which heads learn from; choose "
                "another target."
            )
        for row, sample in enumerate(samples[part]):
            count = len(sample.ids)
            ids = torch.tensor(sample.ids, device=target.device)
            spans = target.family.media_spans(sample.prompt) if sample.prompt.media else []
            features = Features(
                ids=ids,
                visual=target.family.visual_mask(ids),
                answer=answer_mask(len(sample.prompt), count).to(target.device),
                states={layer: hidden[layer][row, :count] for layer in {*layers, len(target.layers)}},
                embeddings=embedded[0][row, :count],
                stops=tuple(stop for _, stop in spans),
            )
            extracted.append(features)
    return extracted


@contextmanager
def _captured_inputs(target: Target) -> Iterator[list[Tensor]]:
    """Collect the decoder's inputs ``[B, S, d]``, the same as heads get in drafting: before the decoder's own changes
    (Granite scales them)."""
    found: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given, ids = kwargs.get("inputs_embeds"), kwargs.get("input_ids", *args[:1])
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


@dataclass(frozen=True, slots=True)
class Finding:
    """Calibration of one prompt."""

    # index of the state after the decoder layer whose attention has the least entropy (DREAM, Eq. 2), as in
    # `saccade.target_model.token_blocks.Requirements`
    layer: int
    dropped: tuple[int, ...]  # ascending positions of visual tokens that have no entry


@torch.inference_mode()
def calibrate(target: Target, prompt: Prompt, pruning: Pruning) -> Finding:
    """Read the attention of all layers during the prefill of a prompt."""
    with AttentionProbe(target) as probe:
        context = Context(target, 1)
        context.cache.reserve(0, len(prompt))
        context.prefill(0, prompt).run(len(prompt))  # in one forward: the probe has the last one's
    entropies = {layer: float(probe.entropies[layer].mean()) for layer in sorted(probe.entropies)}
    columns = probe.columns[max(probe.columns)][0]
    dropped: list[int] = []
    if pruning.needs_attention:
        dropped = pruning.dropped(target.family, prompt, prompt, columns, target.family)
    last = len(prompt) - 1  # always has an entry in drafting
    return Finding(
        min(entropies, key=lambda layer: entropies[layer]) + 1, tuple(place for place in dropped if place != last)
    )
