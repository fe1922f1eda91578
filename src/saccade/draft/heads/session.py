"""A trained head as drafter, with any tree policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.draft.drafter import DraftSession, TreeDrafter
from saccade.draft.heads.head import Head, read_at
from saccade.draft.heads.scale import logits_scale
from saccade.draft.heads.store import check_fit
from saccade.draft.policy import Frontier, TreePolicy
from saccade.draft.sampling import Proposer
from saccade.draft.tree import DraftTree
from saccade.errors import ModelError
from saccade.inputs.batch import visual_mask
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.cache import SlotCache
from saccade.target.context import Context
from saccade.target.masks import visible
from saccade.target.selected import Merged
from saccade.verify.rule import Verdict

CHUNK = 1024
"""Prompt entries that run at once; bounds the attention mask."""


class HeadDrafter(TreeDrafter):
    """A head behind the target that it was trained for.

    Args:
        head: on the target's device, in its dtype (`saccade.draft.heads.store.load_head` puts it there).
        target: whose embedding it shares, and whose LM head if it has none of its own.
        policy: which guesses are worth verifying.

    Raises:
        ModelError: the head was made for another target, or the tree is deeper than it can guess.
    """

    def __init__(self, head: Head, target: Target, policy: TreePolicy) -> None:
        check_fit(head.config, target)
        if head.reach is not None and policy.max_depth > head.reach:
            raise ModelError(
                f"This {head.kind} head guesses {head.reach} tokens ahead, but the tree has up to {policy.max_depth} "
                f"levels; choose a tree of at most {head.reach}."
            )
        super().__init__(policy)
        self.head = head.eval()
        self.target = target
        self._scale = 1.0 if head.has_lm_head else logits_scale(target)

    def open(self, batch: int, target: Context) -> DraftSession:
        return self.head.session_class()(self, batch, target)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[B, N, V]`` after states ``[B, N, d]`` of the head, on the scale of the target's own."""
        lm_head = self.target.model.get_output_embeddings()
        given = hidden if self.head.has_lm_head else hidden.to(lm_head.weight)
        said = self.head.logits(given, lm_head).to(self.target.device)
        return said if self._scale == 1 else said * self._scale


class HeadDraftSession:
    """A head's KV cache, and the target's states that it has been fed and will be.

    A step starts with one forward over the tokens that were emitted last, fed the target's own states: entries of
    guesses, which saw the head's states, were dropped and accepted tokens run anew. Below the root every node is fed
    its parent's output.

    The target's states are kept for every token of a row: a later turn goes on from wherever the target does, and the
    first entry behind that point needs the state before it, which the target does not compute again.

    Attributes:
        cache: of the head; one entry per token that it sees, but the first.
    """

    reading_seconds = 0.0
    lag: ClassVar[int] = 1
    """How many tokens before its own an entry is fed the target's state."""

    def __init__(self, drafter: HeadDrafter, batch: int, target: Context) -> None:
        self._drafter, self._context = drafter, target
        self._head, policy = drafter.head, drafter.policy
        self._device = drafter.target.device
        self._slack = policy.max_run + policy.max_nodes
        self._shaping = policy.open(batch, self._device)
        self.cache: SlotCache = self._head.new_cache(batch, 0)
        self._room = 0
        # Tokens of every row whose entries have run, or would if they were not hidden; and tokens whose states
        # are there, which the last block may have brought.
        self._known, self._fed = [0] * batch, [0] * batch
        self._prompts = [0] * batch  # length of the prompt that each row has read last
        self._active = [False] * batch
        weight = next(self._head.parameters())
        width = self._head.config.hidden_size
        self._features = weight.new_zeros(batch, 0, width)  # [B, S, d], of the target's states at every token
        for layer in self._head.layers:
            target.want_hidden(layer)
        if self._head.is_shown_visual:
            target.merged = target.merged or Merged()

    def grow(self, capacity: int) -> None:
        self._room = capacity
        short = capacity + self._drafter.max_nodes + self._drafter.max_depth - self._features.shape[1]
        if short > 0:
            self._features = pad(self._features, (0, 0, 0, short))

    @torch.inference_mode()
    def load(self, row: int, prompt: Prompt) -> None:
        start, count = self._context.reused[row], len(prompt)
        states = self._states()
        if states.shape[1] != count - start or start > self._fed[row]:
            raise ModelError(
                "The head has not been fed all that the target has read; give both the same prompt, in one session."
            )
        self._features[row, start:count] = self._head.fuse(states[0])
        tokens, sources = self._entries(row, prompt, start)
        self.cache.grow(self._room - (count - 1 - len(tokens)) + self._slack)
        held = min(self.cache.lengths[row], int((tokens < start).sum()))
        self.cache.crop(row, held)
        embedded = self._embedded(row, prompt, start, tokens[held:])
        for at in range(held, len(tokens), CHUNK):
            part = slice(at, at + CHUNK)
            self._read(row, tokens[part], sources[part], embedded[:, at - held : at - held + CHUNK])
        if start < self._prompts[row]:  # no next turn of the same conversation
            self._shaping.restart(row)
        self._known[row] = self._fed[row] = self._prompts[row] = count
        self._feed_answer(row, prompt)

    def _feed_answer(self, row: int, prompt: Prompt) -> None:
        """Put what the first answer token is fed at the prompt's last: the state where `Head.entries` would read it."""
        visual = self._visual(prompt)
        (source,) = self._head.entries(pad(visual, (0, 1)))[1][-1:].tolist() or [len(prompt) - 1]
        self._features[row, len(prompt) - 1] = self._features[row, source]

    @torch.inference_mode()
    def propose(self, new: Sequence[Sequence[int]], proposer: Proposer) -> DraftTree:
        counts = [len(tokens) for tokens in new]
        self._active = [count > 0 for count in counts]
        hidden = self._catch_up(new, max(counts))
        last = torch.tensor([max(c - 1, 0) for c in counts], device=self._device)
        ran = hidden[torch.arange(len(new), device=self._device), last][:, None]  # [B, 1 + F, d], root first
        roots = torch.tensor([t[-1] if t else 0 for t in new], device=self._device)
        growth = self._shaping.begin(roots, proposer, self._active)
        frontier = growth.expand(self._drafter.logits(ran))
        while frontier is not None:
            guessed = self._run(frontier, ran)
            ran = torch.cat([ran, guessed], 1)
            frontier = growth.expand(self._drafter.logits(guessed))
        self.cache.drop_pending()
        return growth.tree()

    @torch.inference_mode()
    def learn(self, tree: DraftTree, scores: Tensor, verdict: Verdict) -> None:
        states = self._states()  # [B, N, F]
        along = states.gather(1, verdict.path[..., None].expand(-1, -1, states.shape[2]))  # [B, D + 1, F]
        along = self._head.fuse(along)  # [B, D + 1, d]
        # Beyond what was accepted they are overwritten before they are read. A row that has ended keeps its own.
        going = [row for row, active in enumerate(self._active) if active]
        firsts = [self._known[row] - 1 for row in going]
        rows, first = torch.tensor([going, firsts], device=self._device)
        places = first[:, None] + torch.arange(along.shape[1], device=self._device)
        self._features[rows[:, None], places] = along[rows]
        for row, place in zip(going, firsts, strict=True):
            self._fed[row] = place + along.shape[1]
        self._shaping.learn(verdict)

    def _states(self) -> Tensor:
        """What the head reads of the target's last forward, ``[B, Q, F]``."""
        assert self._context.hidden is not None
        states = self._context.hidden.states
        return torch.cat([states[layer] for layer in self._head.layers], -1).to(self._features)

    def _visual(self, prompt: Prompt) -> Tensor:
        return visual_mask(self._drafter.target.config, prompt.ids)

    def _entries(self, row: int, prompt: Prompt, start: int) -> tuple[Tensor, Tensor]:
        """As `Head.entries`, of a prompt that the target has read from ``start`` on."""
        return self._head.entries(self._visual(prompt))

    def _read(self, row: int, tokens: Tensor, sources: Tensor, embedded: Tensor) -> None:
        """Run and commit the next entries of a row's prompt, embedded as ``[1, N, d]``."""
        at, slots = self.cache.lengths[row], self.cache.lengths[row] + len(tokens)
        allow = torch.ones(1, len(tokens), slots, dtype=torch.bool, device=self._device).tril(at)
        positions = torch.arange(at, slots, device=self._device)[None]
        features = read_at(self._features[row], sources.to(self._device))[None]
        self.cache.writing_prompt(row, len(tokens))
        self._head(features, embedded, positions, allow, self.cache)
        self.cache.keep_first(row, len(tokens))

    def _catch_up(self, new: Sequence[Sequence[int]], width: int) -> Tensor:
        """Run what every row emitted last with the target's states; ``[B, width, d]``."""
        tokens = torch.tensor([[*t, *[0] * (width - len(t))] for t in new], device=self._device)
        first = torch.tensor([max(n - self.lag, 0) for n in self._known], device=self._device)
        places = first[:, None] + torch.arange(width, device=self._device)
        features = self._features.gather(1, places[..., None].expand(-1, -1, self._features.shape[2]))
        order = torch.arange(width, device=self._device)
        allow = (order <= order[:, None])[None]
        hidden = self._forward(features, tokens, allow, order, 0)
        self.cache.keep([range(len(t)) for t in new])
        self._known = [n + len(t) for n, t in zip(self._known, new, strict=True)]
        return hidden

    def _run(self, frontier: Frontier, ran: Tensor) -> Tensor:
        """States ``[B, W, d]`` of a frontier, each node fed the state of its parent among those that ``ran``."""
        width = frontier.tokens.shape[1]
        before = ran.shape[1] - 1  # the root is no entry of the frontier's own
        # Entries stand in the order of their levels: the last one that a node sees before its level is its parent.
        number = torch.arange(1, before + 1, device=self._device)
        seen = frontier.allow[..., :before] * number
        parent = pad(seen, (1, 0)).amax(-1).expand(ran.shape[0], width)  # [B, W] into ran
        features = ran.gather(1, parent[..., None].expand(-1, -1, ran.shape[2]))
        return self._forward(features, frontier.tokens, frontier.allow, frontier.depth - 1, frontier.depth)

    def _forward(
        self, features: Tensor, tokens: Tensor, allow: Tensor, offset: int | Tensor, step: int
    ) -> Tensor:
        """Pending entries of every row, ``offset`` positions behind its committed ones."""
        lengths = torch.tensor(self.cache.lengths, device=self._device)
        slots = self.cache.writing_nodes(tokens.shape[1])
        seen = visible(allow, self.cache.lengths, slots)
        positions = (lengths[:, None] + offset).expand(tokens.shape)
        out: Tensor = self._head(features, self._embed(tokens), positions, seen, self.cache, step)
        return out

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._drafter.target.model.get_input_embeddings()(tokens)
        return embedded.to(self._features.dtype)

    def _embedded(self, row: int, prompt: Prompt, start: int, tokens: Tensor) -> Tensor:
        """``[1, E, d]`` what the target's decoder was given for these tokens, visual features included."""
        ids = torch.tensor([prompt.ids], device=self._device)[:, tokens.to(self._device)]
        embedded = self._embed(ids)
        if not self._head.is_shown_visual or not prompt.media:
            return embedded
        new = (tokens >= start).to(self._device)
        given = self._given(prompt, start)
        embedded[0, new] = given[tokens[tokens >= start].to(given.device) - start].to(embedded)
        return embedded

    def _given(self, prompt: Prompt, start: int) -> Tensor:
        """``[S, d]`` what the target's decoder was given from ``start`` on; to be asked for once."""
        merged = self._context.merged
        assert merged is not None
        given = merged.of(prompt, start).get("inputs_embeds")
        if given is None:
            raise ModelError(
                f"{type(self._drafter.target.decoder).__name__} is not given embeddings in a known way, which a head "
                "that sees visual tokens needs; use a head that hides them."
            )
        merged.forget()
        found: Tensor = given[0]
        return found
