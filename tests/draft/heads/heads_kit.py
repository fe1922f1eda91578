"""Heads for the tiny families, what a drafting head computed, and the same by the slowest possible means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from families import FAMILIES, FamilyCase, Inputs, pristine, reset_rope_deltas
from saccade.draft.heads.block import Placement
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import Head, build_head
from saccade.draft.heads.session import HeadDrafter, HeadDraftSession
from saccade.draft.trees.dynamic import DynamicTree
from saccade.draft.trees.policy import Chain, Frontier, StaticTree
from saccade.draft.trees.sage import SageTree
from saccade.engine import Engine, Request, RunningBatch
from saccade.engine.generation import plan
from saccade.inputs.families import split, visual_mask
from saccade.inputs.prompt import Prompt
from saccade.output import Output
from saccade.target_model.adapter import Target

KINDS = ("eagle2", "eagle3", "msd", "hivis")
DRAFTING = (*KINDS, "vispec")
"""With those whose entries are given more than one embedding."""
POLICIES: dict[str, Any] = {
    "chain": Chain(4),
    "static": StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)]),
    "dynamic": DynamicTree(top=3, max_depth=4, total=12),
    "sage": SageTree(),
}
LENGTH = 18
"""Length of the answers that heads are taught."""


@cache
def target(name: str) -> Target:
    return Target(FAMILIES[name].model())


def prompts(case: FamilyCase, inputs: Inputs) -> list[Prompt]:
    return split(target(case.name).config, inputs)


def kind_of_prompt(name: str) -> str:
    return "image" if FAMILIES[name].is_visual else "text"


def random_head(name: str, kind: str, seed: int = 0, **options: Any) -> Head:
    """Random weights; the residuals, too, which begin at zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = build_head(HeadConfig.from_target(target(name), kind, **options))
        for parameter in head.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter)
    return head


@cache
def trained_head(name: str, kind: str, rows: int = 3) -> Head:
    """A head that has nearly learnt the answers to the family's first prompts by heart, by teacher forcing."""
    head, case, prompt_kind = random_head(name, kind), FAMILIES[name], kind_of_prompt(name)
    texts = []
    for row in range(rows):
        inputs, answer = case.row_inputs(prompt_kind, row), case.reference(prompt_kind, rows=row + 1)[row]
        texts.append((Text.of(name, inputs, answer[:LENGTH]), len(answer[:LENGTH])))
    lm_head = target(name).model.get_output_embeddings()
    optimiser = torch.optim.Adam(head.parameters(), lr=3e-3)
    with torch.enable_grad():
        for step in range(60):
            text, length = texts[step % rows]
            tokens, sources = slow_entries(head, text.visual)
            count = len(tokens)
            causal = torch.ones(1, count, count, dtype=torch.bool).tril()
            hidden = head(
                fed(head, text)[None, sources],
                head.embed(text.embeddings, text.visual)[None],
                Placement(torch.arange(count)[None], causal),
            )
            logits = head.logits(hidden, lambda h: F.linear(h, lm_head.weight.detach()))
            optimiser.zero_grad()
            F.cross_entropy(logits[0, -length - 1 : -1], text.ids[-length:]).backward()
            optimiser.step()
    return head.eval()


def engine(name: str, head: Head, policy: Any) -> Engine:
    return Engine(target(name), HeadDrafter(head, target(name), policy))


# --------------------------------------------------------------------------- the slow way


@dataclass(frozen=True)
class Text:
    """One row's prompt and what follows, run by the stock model in one piece.

    Attributes:
        ids: ``[S]``.
        visual: ``[S]`` bool.
        states: ``[S, d]`` after the final norm.
        streams: ``[S, d]`` as it enters every layer; the states come last.
        embeddings: ``[S, d]`` what the decoder was given.
        prompt: tokens of the prompt.
    """

    ids: Tensor
    visual: Tensor
    states: Tensor
    streams: tuple[Tensor, ...]
    embeddings: Tensor
    prompt: int

    @classmethod
    @torch.no_grad()
    def of(cls, name: str, inputs: Inputs, more: Sequence[int]) -> Text:
        model, given, streams = pristine(name), {}, {}
        prompt, inputs = inputs["input_ids"].shape[1], _extended(inputs, more)
        decoder = model.get_decoder()

        def keep(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
            embeddings = kwargs.get("inputs_embeds")
            given["embeddings"] = (
                model.get_input_embeddings()(kwargs["input_ids"]) if embeddings is None else embeddings
            )

        def enter(layer: int) -> Any:
            def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
                streams[layer] = args[0] if args else kwargs["hidden_states"]

            return note

        handles = [decoder.register_forward_pre_hook(keep, with_kwargs=True)]
        handles += [
            layer.register_forward_pre_hook(enter(i), with_kwargs=True) for i, layer in enumerate(decoder.layers)
        ]
        reset_rope_deltas(model)
        states = model(**inputs, output_hidden_states=True).hidden_states[-1]
        reset_rope_deltas(model)
        for handle in handles:
            handle.remove()
        ids = inputs["input_ids"][0]
        entering = tuple(streams[i][0] for i in range(len(decoder.layers)))
        visual = visual_mask(model.config, ids)
        return cls(ids, visual, states[0], (*entering, states[0]), given["embeddings"][0], prompt)


def _extended(inputs: Inputs, more: Sequence[int]) -> Inputs:
    extra = torch.tensor([list(more)], dtype=torch.long)
    out = {**inputs, "input_ids": torch.cat([inputs["input_ids"], extra], 1)}
    out["attention_mask"] = torch.ones_like(out["input_ids"])
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in inputs:
            out[name] = torch.cat([inputs[name], torch.zeros_like(extra)], 1)
    return out


def fed(head: Head, text: Text) -> Tensor:
    """``[S + 1, d]`` what the head is fed of the target's states at every token, and zeros."""
    fused = head.fuse(torch.cat([text.streams[layer] for layer in head.layers], -1))
    return torch.cat([fused, torch.zeros_like(fused[:1])])


def slow_entries(head: Head, visual: Tensor) -> tuple[list[int], list[int]]:
    """Which tokens have entries, and at which tokens their features are read, one by one."""
    hides, after = head.hides_visual, head.config.options.get("after_image")
    tokens, sources = [], []
    seen = None
    for token, is_visual in enumerate(visual.tolist()):
        if is_visual and (hides or (head.kind == "vispec" and visual[token + 1])):  # of an image the last one
            continue
        if seen is not None:
            tokens.append(token)
            alone = head.kind in ("msd", "vispec") and is_visual
            sources.append(-1 if alone else seen if hides and after == "text" else token - 1)
        seen = token
    return tokens, sources


def slow_embedding(head: Head, text: Text, token: int) -> Tensor:
    """What the entry of a token is given; with ViSpec a visual one the first of its image's two vectors."""
    if head.kind == "vispec" and text.visual[token]:
        return told(head, text, token, _image_at(head, text, token)[0])
    return told(head, text, token, text.embeddings[token])


def told(head: Head, text: Text, token: int, word: Tensor) -> Tensor:
    """With ViSpec, a word and beside it the second vector of the last image that has ended before this token."""
    if head.kind != "vispec":
        return word
    ended = [t for t in range(token) if text.visual[t] and (t + 1 == len(text.visual) or not text.visual[t + 1])]
    return torch.cat([word, _image_at(head, text, ended[-1])[1] if ended else torch.zeros_like(word)])


def _image_at(head: Head, text: Text, last: int) -> Tensor:
    """``[2, d]`` of the image whose last token is given."""
    first = last
    while first and text.visual[first - 1]:
        first -= 1
    vectors: Tensor = head.adaptor(text.embeddings[first : last + 1])  # type: ignore[operator]
    return vectors


class Slow:
    """Every path of a tree as a sequence of its own, every time from the first token on, without a cache."""

    def __init__(self, name: str, head: Head, text: Text) -> None:
        self._name, self._head, self._text = name, head, text
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] = {}

    def logits(self, length: int, path: tuple[int, ...]) -> Tensor:
        """``[V]`` behind the first ``length`` tokens, which the target has confirmed, and a path of guesses."""
        return self._run(length, path)[1]

    @torch.no_grad()
    def _run(self, length: int, path: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The head's last state, and the logits."""
        if (length, path) not in self._known:
            model, text = target(self._name).model, self._text
            tokens, sources = slow_entries(self._head, text.visual[:length])
            features = [fed(self._head, text)[source] for source in sources]
            embeddings = [slow_embedding(self._head, text, token) for token in tokens]
            for depth, token in enumerate(path):
                features.append(self._run(length, path[:depth])[0])
                word = model.get_input_embeddings()(torch.tensor(token))
                embeddings.append(told(self._head, text, length, word))
            count = len(features)
            steps = torch.tensor([0] * len(tokens) + [depth + 1 for depth in range(len(path))])
            hidden = self._head(
                torch.stack(features)[None],
                torch.stack(embeddings)[None],
                Placement(torch.arange(count)[None], torch.ones(1, count, count, dtype=torch.bool).tril()),
                step=steps,
            )[0, -1]
            logits = self._head.logits(hidden, model.get_output_embeddings())
            self._known[length, path] = hidden, logits
        return self._known[length, path]


# --------------------------------------------------------------------------- what drafting computed


@dataclass
class Drafted:
    """One proposal's trees as the head grew them.

    Attributes:
        rows: slots of the trees.
        emitted: tokens of every request's answer before the step, empty for those that take no part; its root is the
            last of them.
        levels: per forward the tokens, the attention_mask matrix and the logits behind them; the root's first.
    """

    rows: list[int]
    emitted: list[list[int]] = field(default_factory=list)
    levels: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def nodes(self, row: int) -> list[tuple[tuple[int, ...], Tensor]]:
        """Path and logits of every node that was run, the root's path being empty."""
        place = self.rows.index(row)
        found: list[tuple[tuple[int, ...], Tensor]] = [((), self.levels[0][2][place, 0])]
        ran: list[int] = []
        for tokens, attention_mask, logits in self.levels[1:]:
            ran += tokens[place].tolist()
            for number, seen in enumerate(attention_mask.expand(len(tokens), -1, -1)[place].tolist()):
                path = tuple(token for token, sees in zip(ran, seen, strict=True) if sees)
                found.append((path, logits[place, number]))
        return found


class Recording:
    """A tree policy that writes down what its drafter tells it."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.steps: list[Drafted] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def open(self, batch: int, device: torch.device) -> Any:
        shaping = self._policy.open(batch, device)
        return _RecordingShaping(self, shaping)


class _RecordingShaping:
    def __init__(self, owner: Recording, shaping: Any) -> None:
        self._owner, self._shaping = owner, shaping

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shaping, name)

    def begin(self, rows: Sequence[int], roots: Tensor, proposer: Any) -> Any:
        self._owner.steps.append(Drafted(list(rows)))
        return _RecordingGrowth(self._owner.steps[-1], self._shaping.begin(rows, roots, proposer), roots)


class _RecordingGrowth:
    def __init__(self, step: Drafted, growth: Any, roots: Tensor) -> None:
        self._step, self._growth = step, growth
        self._ran = (roots[:, None], torch.ones(1, 1, 1, dtype=torch.bool))
        self._before = 0  # nodes that have run

    def expand(self, logits: Tensor) -> Frontier | None:
        self._step.levels.append((*self._ran, logits.clone()))
        frontier: Frontier | None = self._growth.expand(logits)
        if frontier is not None:
            attention_mask, width = frontier.attention_mask, frontier.tokens.shape[1]
            if attention_mask is None:
                attention_mask = torch.ones(1, width, self._before + width, dtype=torch.bool).tril(self._before)
            self._before += width
            self._ran = frontier.tokens, attention_mask
        return frontier

    def tree(self) -> Any:
        return self._growth.tree()


def recorded(
    name: str,
    head: Head,
    policy: Any,
    asked: Sequence[Prompt],
    n: int = LENGTH,
    session: RunningBatch | None = None,
) -> tuple[list[Output], list[Drafted]]:
    """Answers, and the trees of every proposal. A session's own policy must be the `Recording` given.

    Row i of the answers is in slot i, which holds for a batch of as many rows where each goes on or begins anew.
    """
    recording = policy if isinstance(policy, Recording) else Recording(policy)
    recording.steps.clear()
    under_test = session.engine if session is not None else engine(name, head, recording)
    batch = session or under_test.open(len(asked))
    decoding = plan(under_test.target, list(asked), max_new_tokens=n)
    rows = [batch.add(Request(prompt), own) for prompt, own in zip(asked, decoding.rows, strict=True)]
    slots: list[int | None] = [None] * len(rows)
    steps: list[Drafted] = []
    while not batch.is_idle:
        before = [list(row.output) for row in rows]
        batch.step()
        for index, row in enumerate(rows):
            slots[index] = row.slot if row.slot is not None else slots[index]
            assert row.error is None, row.error
        assert all(slot in (None, index) for index, slot in enumerate(slots))
        for step in recording.steps[len(steps) :]:
            emitted = [answer if i in step.rows else [] for i, answer in enumerate(before)]
            steps.append(replace(step, emitted=emitted))
    return [row.finish() for row in rows], steps


def worst_difference(
    name: str, head: Head, rows: Sequence[Inputs], outputs: Sequence[Output], steps: Sequence[Drafted]
) -> float:
    """Largest difference between any logit that was drafted from and the slow way's, in standard deviations."""
    texts = [Text.of(name, inputs, outputs[row].tokens) for row, inputs in enumerate(rows)]
    return worst_of(rows, steps, [Slow(name, head, text).logits for text in texts])


def worst_of(
    rows: Sequence[Inputs], steps: Sequence[Drafted], slow: Sequence[Callable[[int, tuple[int, ...]], Tensor]]
) -> float:
    """The same with a slow way per row: ``[V]`` logits behind so many tokens and a path of guesses."""
    worst, nodes = 0.0, 0
    for row, inputs in enumerate(rows):
        start = inputs["input_ids"].shape[1]
        for step in steps:
            if step.emitted[row]:
                for path, logits in step.nodes(row):
                    expected = slow[row](start + len(step.emitted[row]), path)
                    worst = max(worst, float((logits - expected).abs().max() / expected.std()))
                    nodes += 1
    assert nodes > len(rows)
    return worst


def answer_features_come_late(monkeypatch: pytest.MonkeyPatch, session: type[HeadDraftSession]) -> None:
    """A planted mistake: what a head is fed of accepted tokens belongs to the tokens behind them."""
    right = session.observe

    def late(self: Any, rows: Any, tree: Any, scores: Tensor, verdict: Any, reading: Any) -> None:
        right(self, rows, tree, scores, replace(verdict, path=verdict.path.roll(-1, 1)), reading)

    monkeypatch.setattr(session, "observe", late)


def drafting(session: RunningBatch) -> HeadDraftSession:
    assert isinstance(session.drafting, HeadDraftSession)
    return session.drafting
