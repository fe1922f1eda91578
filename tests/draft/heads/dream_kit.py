"""DREAM heads for the tiny families, and what they compute by the slowest possible means."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any

import torch
from heads_kit import LENGTH, Drafted, Text, kind_of_prompt, random_head, target, worst_of
from torch import Tensor
from torch.nn import functional as F

from families import FAMILIES, Inputs, reset_rope_deltas
from saccade.draft.heads.block import Placement
from saccade.draft.heads.dream import Dream, DreamDraftSession
from saccade.engine import RunningBatch
from saccade.inputs.families import visual_mask
from saccade.output import Output


def dream(name: str, **options: Any) -> Dream:
    """Random weights; the gates, too, which begin at zero."""
    head = random_head(name, "dream", **options)
    assert isinstance(head, Dream)
    return head.eval()


@cache
def trained_head(name: str, rows: int = 3, **options: Any) -> Dream:
    """A head that has nearly learnt the answers to the family's first prompts by heart."""
    head, case, kind = dream(name, **options), FAMILIES[name], kind_of_prompt(name)
    texts = []
    for row in range(rows):
        inputs, answer = case.row_inputs(kind, row), case.reference(kind, rows=row + 1)[row][:LENGTH]
        texts.append((Text.of(name, inputs, answer), dropped_of(name, inputs, head)))
    lm_head = target(name).model.get_output_embeddings()
    optimiser = torch.optim.Adam(head.parameters(), lr=3e-3)
    with torch.enable_grad():
        for step in range(60):
            text, dropped = texts[step % rows]
            tokens = [t for t in range(1, len(text.ids)) if t not in dropped]
            hidden = run(head, tokens, text.embeddings[tokens], text.states[:-1])
            logits = F.linear(hidden, lm_head.weight.detach())
            optimiser.zero_grad()
            F.cross_entropy(logits[-LENGTH - 1 : -1], text.ids[-LENGTH:]).backward()
            optimiser.step()
    return head.eval()


def run(head: Dream, tokens: Sequence[int], embeddings: Tensor, features: Tensor) -> Tensor:
    """``[E, d]`` of one sequence without a cache: token t sees the features of the tokens before t."""
    count = len(tokens)
    reach = torch.zeros(count, len(features), dtype=torch.bool)
    for place, token in enumerate(tokens):
        reach[place, :token] = True
    out: Tensor = head(
        features[None],
        embeddings[None],
        Placement(torch.tensor(tokens)[None] - 1, torch.ones(1, count, count, dtype=torch.bool).tril()),
        reach=reach[None],
        places=torch.arange(len(features))[None],
    )[0]
    return out


@torch.no_grad()
def dropped_of(name: str, inputs: Inputs, head: Dream, start: int = 0) -> set[int]:
    """Visual tokens from ``start`` on that have no entry, by the eager attention of the target's last layer.

    Media are stretches of placeholders, which holds for the families that the tests ask for.
    """
    model = _eager(name)
    reset_rope_deltas(model)
    weights = model(**inputs, use_cache=False, output_attentions=True).attentions[-1][0]  # [H, S, S]
    reset_rope_deltas(model)
    scores = weights.mean(0)[start:].sum(0)
    visual = visual_mask(model.config, inputs["input_ids"][0]).tolist()
    dropped: set[int] = set()
    for is_visual, group in groupby(range(len(visual)), key=visual.__getitem__):
        places = list(group)
        if is_visual and places[0] >= start:
            kept = max(1, int(head.config.options["keep"] * len(places) + 0.5))
            dropped.update(sorted(places, key=lambda p: -float(scores[p]))[kept:])
    return dropped - {len(visual) - 1}


@cache
def _eager(name: str) -> Any:
    model = FAMILIES[name].model()
    model.set_attn_implementation("eager")
    return model


class SlowDream:
    """Every path of a tree as a sequence of its own, every time from the first token on."""

    def __init__(self, name: str, head: Dream, text: Text, dropped: set[int]) -> None:
        self._model, self._head, self._text, self._dropped = target(name).model, head, text, dropped
        self._known: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def logits(self, length: int, path: tuple[int, ...]) -> Tensor:
        """``[V]`` behind the first ``length`` tokens, which the target has confirmed, and a path of guesses."""
        out: Tensor = self._model.get_output_embeddings()(self._state(length, path))
        return out

    @torch.no_grad()
    def _state(self, length: int, path: tuple[int, ...]) -> Tensor:
        if (length, path) not in self._known:
            known = [t for t in range(1, length) if t not in self._dropped]
            guessed = self._model.get_input_embeddings()(torch.tensor(path, dtype=torch.long))
            own = [self._state(length, path[:depth]) for depth in range(len(path))]
            features = [*self._text.states[: length - 1], *own]
            embeddings = torch.cat([self._text.embeddings[known], guessed])
            tokens = [*known, *range(length, length + len(path))]
            self._known[length, path] = run(self._head, tokens, embeddings, torch.stack(features))[-1]
        return self._known[length, path]


@torch.no_grad()
def worst_difference(
    name: str,
    head: Dream,
    rows: Sequence[Inputs],
    dropped: Sequence[set[int]],
    outputs: Sequence[Output],
    steps: Sequence[Drafted],
) -> float:
    """Largest difference between any logit that was drafted from and the slow way's, in standard deviations."""
    texts = [Text.of(name, inputs, outputs[row].tokens) for row, inputs in enumerate(rows)]
    slow = [SlowDream(name, head, text, without) for text, without in zip(texts, dropped, strict=True)]
    return worst_of(rows, steps, [one.logits for one in slow])


def drafting(session: RunningBatch) -> DreamDraftSession:
    assert isinstance(session.drafting, DreamDraftSession)
    return session.drafting
