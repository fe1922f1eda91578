"""Heads for the tiny families, what a drafting head computed, and the same by the slowest possible means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

import harness
from families import FAMILIES, Inputs, pristine, reset_rope_deltas
from harness import prompts, target
from saccade.draft.heads.dream import Dream
from saccade.draft.heads.head import Head, HeadConfig, Placement, build_head
from saccade.draft.heads.session import HeadDrafter, HeadDraftSession
from saccade.draft.trees.policy import Frontier
from saccade.draft.trees.sage import SageTree
from saccade.engine import Engine, Request, RunningBatch
from saccade.engine.row import plan
from saccade.inputs.families import family_of
from saccade.inputs.families.family import Prompt
from saccade.output import Output

KINDS = ("eagle2", "eagle3", "msd", "hivis")
DRAFTING = (*KINDS, "vispec", "peagle")
"""With those whose entries have more than one embedding, or are masks."""
AHEAD = ("medusa", "hydra")
EVERY = (*DRAFTING, "dream", "kangaroo", *AHEAD)
POLICIES: dict[str, Any] = {**harness.POLICIES, "sage": SageTree()}
LENGTH = 18
"""Length of the answers that heads are taught."""


def touching_images() -> tuple[Prompt, Prompt]:
    """A prompt with an image, and the same with another one right after it."""
    case = FAMILIES["llava"]
    (base,) = prompts(case, case.row_inputs("image", 0))
    (other,) = prompts(case, case.row_inputs("image", 1))
    places = [i for i, token in enumerate(base.ids) if token == target("llava").config.image_token_id]
    stop = places[-1] + 1
    pictures = base.ids[places[0] : stop]
    return base, Prompt((*base.ids[:stop], *pictures, *base.ids[stop:]), (base.media[0], other.media[0]))


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
    # Kangaroo's exit is as late as it can be, so that more than one layer runs where the family has more than two.
    options = {"exit": len(target(name).layers) - 1} if kind == "kangaroo" else {}
    head, case, prompt_kind = random_head(name, kind, **options), FAMILIES[name], kind_of_prompt(name)
    if kind == "medusa":
        with torch.no_grad():
            for weight in head.parameters():
                weight.mul_(0.05)
    texts = []
    for row in range(rows):
        inputs, answer = case.row_inputs(prompt_kind, row), case.reference(prompt_kind, rows=row + 1)[row]
        texts.append((Text.of(name, inputs, answer[:LENGTH]), dropped_of(name, inputs, head)))
    weight = target(name).model.get_output_embeddings().weight.detach()
    optimiser = torch.optim.Adam(head.parameters(), lr=1e-2 if kind == "kangaroo" else 3e-3)
    with torch.enable_grad():
        for step in range(150 if kind in AHEAD else 60):
            text, dropped = texts[step % rows]
            optimiser.zero_grad()
            _loss(head, text, dropped, lambda hidden: F.linear(hidden, weight)).backward()
            optimiser.step()
    return head.eval()


def _loss(head: Head, text: Text, dropped: set[int], lm_head: Callable[[Tensor], Tensor]) -> Tensor:
    length = len(text.ids) - text.prompt
    if head.kind not in AHEAD:
        logits = head.logits(whole(head, text, dropped)[None], lm_head)[0]
        return F.cross_entropy(logits[-length - 1 : -1], text.ids[-length:])
    loss, roots = torch.zeros(()), torch.arange(text.prompt, len(text.ids) - 5)
    for depth in range(5):
        path = text.embeddings[roots[:, None] + torch.arange(depth + 1)]
        guess = head(text.states[roots - 1], path, step=depth)  # type: ignore[call-arg]
        loss = loss + F.cross_entropy(lm_head(guess), text.ids[roots + depth + 1])
    return loss


def whole(head: Head, text: Text, dropped: set[int]) -> Tensor:
    """``[E, d]`` a head's outputs over a text in one piece, without a cache."""
    if isinstance(head, Dream):
        tokens = [token for token in range(1, len(text.ids)) if token not in dropped]
        return run_dream(head, tokens, text.embeddings[tokens], text.states[:-1])
    if head.kind == "kangaroo":
        features, embeddings = text.streams[head.layers[0]], None
    else:
        tokens, sources = slow_entries(head, text.visual)
        features, embeddings = fed(head, text)[sources], head.embed(text.embeddings, text.visual)[None]
    out: Tensor = head(features[None], embeddings, causal(len(features)))[0]
    return out


def causal(count: int) -> Placement:
    return Placement(torch.arange(count)[None], torch.ones(1, count, count, dtype=torch.bool).tril())


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
        visual = family_of(model.config).visual_mask(ids)
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
        return with_image(head, text, token, _image_at(head, text, token)[0])
    return with_image(head, text, token, text.embeddings[token])


def with_image(head: Head, text: Text, token: int, word: Tensor) -> Tensor:
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

    def __init__(self, name: str, head: Head, text: Text, dropped: set[int]) -> None:
        self._model, self._head, self._text, self._dropped = target(name).model, head, text, dropped
        self._known: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self._fed = torch.no_grad()(cache(lambda: fed(head, text)))
        self._embedded = cache(partial(slow_embedding, head, text))

    @torch.no_grad()
    def logits(self, length: int, path: tuple[int, ...]) -> Tensor:
        """``[V]`` after the first ``length`` tokens, which the target has confirmed, and a path of guesses."""
        return self._head.logits(self._state(length, path), self._model.get_output_embeddings())

    def _state(self, length: int, path: tuple[int, ...]) -> Tensor:
        """The head's last output."""
        if (length, path) not in self._known:
            words = self._model.get_input_embeddings()(torch.tensor(path, dtype=torch.long))
            own = [self._state(length, path[:depth]) for depth in range(len(path))]
            run = self._dream if isinstance(self._head, Dream) else self._entries
            self._known[length, path] = run(length, words, own)
        return self._known[length, path]

    def _entries(self, length: int, words: Tensor, own: list[Tensor]) -> Tensor:
        tokens, sources = slow_entries(self._head, self._text.visual[:length])
        features = [*(self._fed()[source] for source in sources), *own]
        embeddings = [self._embedded(token) for token in tokens]
        embeddings += [with_image(self._head, self._text, length, word) for word in words]
        steps = torch.tensor([0] * len(tokens) + [depth + 1 for depth in range(len(own))])
        at = causal(len(features))
        out: Tensor = self._head(torch.stack(features)[None], torch.stack(embeddings)[None], at, step=steps)[0, -1]
        return out

    def _dream(self, length: int, words: Tensor, own: list[Tensor]) -> Tensor:
        assert isinstance(self._head, Dream)
        known = [t for t in range(1, length) if t not in self._dropped]
        features = torch.stack([*self._text.states[: length - 1], *own])
        embeddings = torch.cat([self._text.embeddings[known], words])
        return run_dream(self._head, [*known, *range(length, length + len(own))], embeddings, features)[-1]


def run_dream(head: Dream, tokens: Sequence[int], embeddings: Tensor, features: Tensor) -> Tensor:
    """``[E, d]`` of one sequence without a cache: token t sees the features of the tokens before t."""
    count = len(tokens)
    reach = torch.zeros(count, len(features), dtype=torch.bool)
    for place, token in enumerate(tokens):
        reach[place, :token] = True
    out: Tensor = head(
        features[None],
        embeddings[None],
        Placement(torch.tensor(tokens)[None] - 1, causal(count).attention_mask),
        over=Placement(torch.arange(len(features))[None], reach[None]),
    )[0]
    return out


@torch.no_grad()
def dropped_of(name: str, inputs: Inputs, head: Head, start: int = 0) -> set[int]:
    """Visual tokens from ``start`` on without an entry in DREAM, by the eager attention of the target's last layer.

    Media are stretches of placeholders, as in the families of these tests.
    """
    if head.kind != "dream":
        return set()
    model = _eager(name)
    reset_rope_deltas(model)
    weights = model(**inputs, use_cache=False, output_attentions=True).attentions[-1][0]  # [H, S, S]
    reset_rope_deltas(model)
    scores = weights.mean(0)[start:].sum(0)
    visual = family_of(model.config).visual_mask(inputs["input_ids"][0]).tolist()
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


def slow_ahead(name: str, head: Head, text: Text, length: int, path: tuple[int, ...]) -> Tensor:
    """``[V]`` by the formulas of Medusa and Hydra."""
    model, weights, depth = target(name).model, dict(head.named_parameters()), len(path)
    state = text.states[length - 2]
    if head.kind == "medusa":
        inner = F.linear(state, weights[f"stacks.{depth}.0.linear.weight"], weights[f"stacks.{depth}.0.linear.bias"])
        guess = state + inner * inner.sigmoid()
    else:

        def normed(x: Tensor, which: str) -> Tensor:
            scale = (x.square().mean(-1, keepdim=True) + head.config.norm_eps).rsqrt()
            return x * scale * weights[f"{which}_norm.weight"]

        words = model.get_input_embeddings()(torch.tensor([int(text.ids[length - 1]), *path]))
        both = torch.cat([normed(state, "feature"), normed(words, "embedding").flatten()])
        hidden = F.linear(both, weights[f"inner.{depth}.weight"], weights[f"inner.{depth}.bias"])
        hidden = hidden * hidden.sigmoid()
        guess = state + F.linear(hidden, weights[f"outer.{depth}.weight"], weights[f"outer.{depth}.bias"])
    logits: Tensor = model.get_output_embeddings()(guess)
    return logits


@torch.no_grad()
def slow_kangaroo(
    name: str, head: Head, inputs: Inputs, answer: Sequence[int], length: int, path: tuple[int, ...]
) -> Tensor:
    """``[V]`` by the stock model, which runs the text and the path in one piece."""
    text = Text.of(name, inputs, [*answer[: length - inputs["input_ids"].shape[1]], *path])
    return head.logits(whole(head, text, set())[-1], target(name).model.get_output_embeddings())


# --------------------------------------------------------------------------- what drafting computed


@dataclass
class Drafted:
    """One proposal's trees as the head grew them.

    Attributes:
        rows: slots of the trees.
        emitted: tokens of every request's answer before the step, empty for those that take no part; its root is the
            last of them.
        levels: per forward the tokens, the attention_mask matrix and the logits after them; the root's first.
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
    name: str, head: Head, policy: Any, asked: Sequence[Prompt], n: int = LENGTH, session: RunningBatch | None = None
) -> tuple[list[Output], list[Drafted]]:
    """Answers, and the trees of every proposal. A session's own policy must be the `Recording` given.

    Row i of the answers is in slot i, which holds for a batch of as many rows where each goes on or begins anew.
    """
    recording = policy if isinstance(policy, Recording) else Recording(policy)
    recording.steps.clear()
    under_test = session.engine if session is not None else engine(name, head, recording)
    batch = session or under_test.open(len(asked))
    decoding = plan(under_test.target, list(asked), max_new_tokens=n)
    rows = [batch.add(Request(prompt), own) for prompt, own in zip(asked, decoding, strict=True)]
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
    name: str,
    head: Head,
    rows: Sequence[Inputs],
    outputs: Sequence[Output],
    steps: Sequence[Drafted],
    dropped: Sequence[set[int]] | None = None,
) -> float:
    """Largest difference between any logit that was drafted from and the slow way's, in standard deviations."""
    slow: list[Callable[[int, tuple[int, ...]], Tensor]] = []
    for row, inputs in enumerate(rows):
        answer = outputs[row].tokens
        text = Text.of(name, inputs, answer)
        if head.kind == "kangaroo":
            slow.append(partial(slow_kangaroo, name, head, inputs, answer))
        elif head.kind in AHEAD:
            slow.append(torch.no_grad()(partial(slow_ahead, name, head, text)))
        else:
            without = dropped_of(name, inputs, head) if dropped is None else dropped[row]
            slow.append(Slow(name, head, text, without).logits)
    return worst_of(rows, steps, slow)


def worst_of(
    rows: Sequence[Inputs], steps: Sequence[Drafted], slow: Sequence[Callable[[int, tuple[int, ...]], Tensor]]
) -> float:
    """The same with a slow way per row: ``[V]`` logits after so many tokens and a path of guesses."""
    worst, nodes = 0.0, 0
    for row, inputs in enumerate(rows):
        start = inputs["input_ids"].shape[1]
        for step in steps:
            if step.emitted[row]:
                for path, logits in step.nodes(row):
                    expected = slow[row](start + len(step.emitted[row]), path)
                    worst = max(worst, float((logits - expected).detach().abs().max() / expected.std()))
                    nodes += 1
    assert nodes > len(rows)
    return worst


def entries_of(session: RunningBatch) -> Any:
    return cast("HeadDraftSession", session.drafting).entries
