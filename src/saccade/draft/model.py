"""A smaller model of the same tokenizer as drafter, with any tree policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from saccade.draft.drafter import TreeDrafter
from saccade.draft.policy import TreePolicy
from saccade.draft.sampling import Proposer
from saccade.draft.tree import DraftTree
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.context import Context
from saccade.target.selected import Merged
from saccade.verify.rule import Verdict


class ModelDrafter(TreeDrafter):
    """A draft VLM or LLM.

    Args:
        model: the adapter of the draft model.
        policy: which guesses are worth verifying.
        vocab_size: number of tokens that target and drafter share (a padded vocabulary is cut to it); the
            drafter's own when None.
    """

    def __init__(self, model: Target, policy: TreePolicy, vocab_size: int | None = None) -> None:
        super().__init__(policy)
        self.model = model
        self.vocab_size = min(vocab_size or model.vocab_size, model.vocab_size)

    def open(self, batch: int, target: Context) -> ModelDraftSession:
        return ModelDraftSession(self, batch)


class ModelDraftSession:
    """A draft model's KV cache and the tokens that it has not seen yet.

    Entries of drafted tokens are dropped after every step and accepted ones run again with the bonus token, in
    the one forward that starts the next step: no gather, and the same for every kind of drafter.
    """

    reading_seconds = 0.0

    def __init__(self, drafter: ModelDrafter, batch: int) -> None:
        self._drafter = drafter
        self._slack = drafter.policy.max_run + drafter.policy.max_nodes
        self.context = Context(drafter.model, batch, 0)
        self._shaping = drafter.policy.open(batch, drafter.model.device)
        self._asked: list[Prompt | None] = [None] * batch
        self._rows = torch.arange(batch, device=drafter.model.device)
        self._known: int = drafter.model.model.get_input_embeddings().weight.shape[0]
        self._causal: dict[int, tuple[Tensor, Tensor]] = {}
        self._depths: dict[tuple[tuple[int, int], ...], Tensor] = {}

    def grow(self, capacity: int) -> None:
        self.context.cache.grow(capacity + self._slack)

    def load(self, row: int, prompt: Prompt) -> None:
        self.read(row, replace(prompt, ids=tuple(self._readable(prompt.ids))))

    def read(
        self, row: int, prompt: Prompt, dropped: Sequence[int] = (), merged: Merged | None = None
    ) -> None:
        """Make the row hold a prompt of readable ids; further arguments as in `Context.load`.

        The tree policy keeps what it has seen of a row from one turn of a conversation to the next (see `goes_on`).
        """
        self.context.load(row, prompt, dropped, merged)
        asked, self._asked[row] = self._asked[row], prompt
        if asked is not None and not goes_on(asked, prompt):
            self._shaping.restart(row)

    @torch.inference_mode()
    def propose(self, new: Sequence[Sequence[int]], proposer: Proposer) -> DraftTree:
        counts = [len(tokens) for tokens in new]
        width = max(counts)
        roots = torch.tensor([t[-1] if t else 0 for t in new], device=self._drafter.model.device)
        new = [self._readable(t) for t in new]
        tokens = torch.tensor([[*t, *[0] * (width - len(t))] for t in new], device=roots.device)  # [B, P]
        allow, depth = self._chain(width)
        logits = self.context.forward(tokens, allow, depth)
        self.context.keep([range(c) for c in counts], new)
        last = torch.tensor([max(c - 1, 0) for c in counts], device=tokens.device)
        growth = self._shaping.begin(roots, proposer)
        frontier = growth.expand(self._cut(logits[self._rows, last][:, None]))
        levels: tuple[tuple[int, int], ...] = ()
        while frontier is not None:
            levels = (*levels, (frontier.depth - 1, frontier.tokens.shape[1]))
            logits = self.context.forward(frontier.tokens, frontier.allow, self._depth(levels))
            frontier = growth.expand(self._cut(logits))
        self.context.cache.drop_pending()
        return growth.tree()

    def learn(self, tree: DraftTree, scores: Tensor, verdict: Verdict) -> None:
        self._shaping.learn(verdict)

    def _readable(self, ids: Sequence[int]) -> list[int]:
        """The ids with 0 for those that the drafter has no embedding for (padding of a larger vocabulary)."""
        return [token if token < self._known else 0 for token in ids]

    def _cut(self, logits: Tensor) -> Tensor:
        return logits[..., : self._drafter.vocab_size]

    def _depth(self, levels: tuple[tuple[int, int], ...]) -> Tensor:
        """``[1, F]`` depths of the entries of these levels, each given as (depth, width)."""
        if levels not in self._depths:
            depths = [[depth for depth, width in levels for _ in range(width)]]
            self._depths[levels] = torch.tensor(depths, device=self._drafter.model.device)
        return self._depths[levels]

    def _chain(self, width: int) -> tuple[Tensor, Tensor]:
        if width not in self._causal:
            device = self._drafter.model.device
            allow = torch.ones(1, width, width, dtype=torch.bool, device=device).tril()
            self._causal[width] = allow, torch.arange(width, device=device)[None]
        return self._causal[width]


def goes_on(earlier: Prompt, prompt: Prompt) -> bool:
    """Whether a prompt is a later turn of a conversation: it begins with the earlier one, pictures included.

    Any other is a new prompt, even if a template gives both the same first tokens, and so is the same one again.
    """
    same = prompt.ids[: len(earlier)] == earlier.ids and len(prompt) > len(earlier)
    seen = zip(earlier.media, prompt.media, strict=False)
    return same and len(prompt.media) >= len(earlier.media) and all(a.digest == b.digest for a, b in seen)
