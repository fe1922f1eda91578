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
        return self.draft(new, self.take(new), proposer)

    def take(self, new: Sequence[Sequence[int]]) -> Tensor:
        """Run and keep what the rows emitted; logits ``[B, P, V]`` after each of the tokens, the longest row's P."""
        logits = self.run(new)
        self.context.keep([range(len(tokens)) for tokens in new], [self._readable(tokens) for tokens in new])
        return logits

    def run(self, new: Sequence[Sequence[int]]) -> Tensor:
        """As `take`, but the tokens' entries stay pending."""
        width = max(map(len, new))
        tokens = [[*self._readable(t), *[0] * (width - len(t))] for t in new]  # [B, P]
        allow, depth = self._chain(width)
        return self._cut(self.context.forward(self._tensor(tokens), allow, depth))

    def draft(self, new: Sequence[Sequence[int]], said: Tensor, proposer: Proposer) -> DraftTree:
        """Guess on from what `take` of these tokens has ``said``."""
        roots = self._tensor([tokens[-1] if tokens else 0 for tokens in new])
        if min(map(len, new)) == said.shape[1]:
            last = said[:, -1:]
        else:
            last = said[self._rows, self._tensor([max(len(tokens) - 1, 0) for tokens in new])][:, None]
        growth = self._shaping.begin(roots, proposer, [bool(tokens) for tokens in new])
        frontier = growth.expand(last)
        levels: tuple[tuple[int, int], ...] = ()
        while frontier is not None:
            levels = (*levels, (frontier.depth - 1, frontier.tokens.shape[1]))
            run = frontier.tokens, frontier.allow, self._depth(levels)
            context = self.context
            said = context.forward_rows(frontier.rows, *run) if frontier.rows else context.forward(*run)
            frontier = growth.expand(self._cut(said))
        self.context.cache.drop_pending()
        return growth.tree()

    def learn(self, tree: DraftTree, scores: Tensor, verdict: Verdict) -> None:
        self._shaping.learn(verdict)

    def _readable(self, ids: Sequence[int]) -> list[int]:
        """The ids with 0 for those that the drafter has no embedding for (padding of a larger vocabulary)."""
        return [token if token < self._known else 0 for token in ids]

    def _tensor(self, values: Sequence[object]) -> Tensor:
        """Host values on the draft model's device, which is not waited for."""
        return torch.tensor(values).to(self._drafter.model.device, non_blocking=True)

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
    seen = zip(earlier.media, prompt.media, strict=False)  # later turns may bring more
    return same and len(prompt.media) >= len(earlier.media) and all(a.digest == b.digest for a, b in seen)
