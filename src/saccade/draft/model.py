"""A smaller model of the same tokenizer as drafter, with any tree policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from saccade.draft.captured import POLICIES, Capture, CapturedDraft, Drafted, DraftGraphs, capturing
from saccade.draft.drafter import Begun, Drafter, DrafterFacts, DraftSession, Loaded, rests
from saccade.draft.trees.policy import (
    ConfidentChain,
    Frontier,
    PacedProposer,
    Proposer,
    Signals,
    Spliced,
    TopProposer,
    TreePolicy,
    grow,
    signals_of,
)
from saccade.errors import ModelError
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.cache import on_device
from saccade.target_model.context import Context, Prefill, PrefillResult
from saccade.target_model.executor import Ahead, Unread
from saccade.target_model.graphs import GraphExecutor
from saccade.target_model.stock import replaced
from saccade.target_model.token_blocks import ForwardOutput, Requirements, TokenBlock
from saccade.tree import DraftTree, Emitted, Rows, at_nodes
from saccade.verify.rule import Verdict

_AHEAD, _MOST_AHEAD = 4, 16  # draft tokens that a model makes in one pass where the chain may end before, and at most


class ModelDrafter(Drafter):
    """A draft VLM or LLM."""

    splices: ClassVar[bool] = True  # as of `DrafterFacts`

    def __init__(self, model: Target, policy: TreePolicy, vocab_size: int | None = None) -> None:
        self.facts = DrafterFacts.of(policy, model, splices=self.splices)
        self.model, self.policy = model, policy  # the adapter of the draft model, and the form of its trees
        self.vocab_size = min(vocab_size or model.vocab_size, model.vocab_size)
        self.key = f"{policy} {self.vocab_size}"  # of its captured drafts
        self.is_captured = policy.max_children > 1 and type(policy) in POLICIES and model.executor.reserve_drafts()

    def open(self, rows: int, target: Context) -> ModelDraftSession:
        return ModelDraftSession(self, rows, target)


class ModelDraftSession(DraftSession):
    """A draft model's KV cache.

    Entries of draft tokens are dropped after every step; accepted ones run again with the bonus token, in the forward
    that starts the next step. That needs no gather and suits every kind of drafter.
    """

    def __init__(self, drafter: ModelDrafter, rows: int, target: Context) -> None:
        self._drafter, self._target = drafter, target
        self._slack = drafter.policy.max_run + drafter.policy.max_nodes + _AHEAD
        most = target.cache.max_slots * rows // target.rows  # as many for a row as the target has, each view a row
        self.context = Context(drafter.model, rows, target.media, most, drafter.policy.max_children > 1)
        self._numbers = self.context.cache.share_numbers(target.cache)
        self._shaping = drafter.policy.open(rows, drafter.model.device)
        self._is_chain = drafter.policy.max_children <= 1
        self._max_depth = drafter.policy.max_depth
        self._prompts: list[Prompt | None] = [None] * rows
        self._parts: dict[int, Prefill] = {}
        self._num_embeddings: int = drafter.model.model.get_input_embeddings().weight.shape[0]
        self._depths: dict[tuple[tuple[int, int], ...], Tensor] = {}
        self._steps = 0  # of the last chains
        self._limit: int | None = None  # of the last draft, if a graph made it
        self._next = Begun()

    def begin(self, row: int, capacity: int, key: str | None = None) -> None:
        self.context.cache.reserve(row, capacity + self._slack)

    def restart(self, row: int) -> None:
        self._prompts[row] = None

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None, budget: int | None = None) -> Loaded:
        part = 0 if budget is None else self._load_part(row, prompt, budget)
        if not part:
            self.load_pruned(row, prompt)
        return Loaded(part)

    def _load_part(self, row: int, prompt: Prompt, budget: int) -> int:
        """Prefill about ``budget`` more tokens and return their number; 0, with nothing done, if no more are left."""
        own = self._own(prompt)
        prefill = self._parts.get(row)
        if prefill is None or prefill.prompt != own:
            prefill = self._parts[row] = self.context.prefill(row, own)
        begun = prefill.num_computed
        if len(prompt) - begun <= budget:
            return 0
        self.context.cache.reserve(row, prefill.entries)
        prefill.run(prefill.chunk_end(budget))
        return prefill.num_computed - begun

    def load_pruned(self, row: int, prompt: Prompt, dropped: Sequence[int] = ()) -> None:
        """Prefill a row; ``dropped`` as in `Context.load`. The policy retains its history from turn to turn."""
        self._parts.pop(row, None)
        self.context.load(row, self._own(prompt), dropped)
        self._begin(row, prompt)

    def load_together(self, rows: Rows, prompts: Sequence[Prompt]) -> bool:
        if any(row in self._parts for row in rows):
            return False
        if not self.context.load_together(rows, [self._own(prompt) for prompt in prompts]):
            return False
        for row, prompt in zip(rows, prompts, strict=True):
            self._begin(row, prompt)
        return True

    def _begin(self, row: int, prompt: Prompt) -> None:
        self._next.abandon(row)
        if not self.continues(row, prompt):
            self._shaping.restart(row)
        self._prompts[row] = prompt

    def _own(self, prompt: Prompt) -> Prompt:
        return replace(prompt, ids=tuple(self._embeddable(prompt.ids)))

    def continues(self, row: int, prompt: Prompt) -> bool:
        """Whether a prompt is a later turn of the row's conversation."""
        earlier = self._prompts[row]
        return earlier is not None and is_later_turn(earlier, prompt)

    def forget(self, row: int) -> None:
        self._next.abandon(row)
        self._parts.pop(row, None)
        self.context.forget(row)
        self._prompts[row] = None
        self._shaping.restart(row)

    @torch.inference_mode()
    def propose(self, rows: Rows, new: Emitted, proposer: Proposer, limit: int) -> DraftTree:
        begun, self._next = self._next, Begun()
        self._limit = None
        self.can_begin = False
        tree = self._drafted_ahead(rows, new, proposer, limit, begun)
        if tree is not None:
            return tree
        capture = self._capture(rows, new, proposer, limit)
        captured = None if capture is None else capture.draft(new, begun)
        if isinstance(captured, DraftTree):
            self._limit = limit
            self.can_begin = True
            self.context.commit(rows, [range(len(each)) for each in new], new)
            return captured
        logits = self.run(rows, new, self._target.numbers_of(rows))
        if capture is not None and captured is not None and self._agrees(rows, new, logits, capture, captured):
            return captured.tree()
        return self.draft(rows, new, logits, proposer, limit)

    def _capture(self, rows: Rows, new: Emitted | Unread, proposer: Proposer, limit: int) -> Capture | None:
        """Return how drafts of these rows after these tokens are captured; None where they are not."""
        drafter, context = self._drafter, self.context
        executor = capturing(drafter.model, proposer) if drafter.is_captured else None
        steps, first = context.cache.graphs, context.next_positions(rows)
        if executor is None or steps is None or first is None or context.cache.states is not None:
            return None
        if drafter.vocab_size > self._num_embeddings:
            return None
        if not isinstance(new, Unread) and max(map(max, new)) >= self._num_embeddings:
            return None
        if drafter.key not in steps.drafts:
            steps.drafts[drafter.key] = DraftGraphs(executor, drafter.policy, drafter.model.traits.masks.reach)
        return Capture(
            steps.drafts[drafter.key],
            [context.cache],
            rows,
            first,
            limit,
            self._numbers,
            self._target.numbers_of(rows),
            drafter.model.dtype,
            partial(self._fix, rows, limit),
        )

    def _fix(self, rows: Rows, limit: int, inputs: CapturedDraft) -> Drafted:
        """Draft with all numbers in fixed memory."""
        model, cache = self._drafter.model, self.context.cache
        vocab = self._drafter.vocab_size
        executor = cast("GraphExecutor", model.executor)
        last = len(model.layers)
        bound = model.traits.limits.context or torch.iinfo(torch.long).max
        ran, frontiers = list[Tensor](), list[Frontier]()

        def forward(tokens: Tensor, mask: Tensor | None, gap: int | None, nodes: Tensor | None = None) -> Tensor:
            rows, count = tokens.shape
            positions = inputs.place([cache], count, mask, gap, model.dtype, model.traits.masks.names)
            positions = positions.clamp(max=bound - 1).flatten()[None]
            packed = None
            if nodes is not None:
                begins = torch.arange(0, rows * count, count, device=nodes.device)
                packed = (nodes + begins[:, None]).flatten()
            logits, hidden = executor.ordinary.compute(cache, tokens, positions, Requirements((last,)), packed)
            states = hidden[last].view(rows, count, -1)
            ran.append(states if nodes is None else at_nodes(states, nodes))
            return logits.view(rows, -1, logits.shape[-1])[..., :vocab]

        def run(frontier: Frontier) -> Tensor:
            frontiers.append(frontier)
            return forward(frontier.tokens, frontier.attention_mask, frontier.depth - 1)

        growth = self._shaping.begin(rows, inputs.tokens.gather(1, inputs.last)[:, 0], TopProposer())
        first = forward(inputs.tokens, None, None, inputs.last)
        tree = grow(self._drafter.policy, growth, first, run, limit)
        return Drafted(tree, growth, ran, frontiers)

    def _scored(self, states: Tensor) -> Tensor:
        return self._shared(self._drafter.model.lm_head(states))

    def _agrees(
        self, rows: Rows, new: Emitted, logits: Sequence[Tensor], capture: Capture, captured: CapturedDraft
    ) -> bool:
        """Whether ordinary operations after the roots' logits give a captured draft."""
        levels, drafter = list[tuple[int, int]](), self._drafter

        def pair(ran: list[Tensor], frontier: Frontier | None) -> tuple[Tensor, Tensor]:
            theirs = torch.stack([each[-1:] for each in logits])
            if frontier is not None:
                with replaced([(drafter.model.executor, "enabled", False)]):  # or its forwards would be captured
                    theirs = self._level(rows, frontier, levels)
            return self._scored(ran[-1]), theirs

        roots = self._numbers.get([each[-1] for each in new])
        return capture.agrees(self._shaping.begin(rows, roots, TopProposer()), captured, pair)

    def _drafted_ahead(
        self, rows: Rows, new: Emitted, proposer: Proposer, limit: int, begun: Begun
    ) -> DraftTree | None:
        """Chains of the likeliest tokens where the model runs several of these in one pass; None elsewhere."""
        policy, vocab = self._drafter.policy, self._drafter.vocab_size
        if not (self._is_chain and isinstance(proposer, TopProposer)) or proposer.guide is not None:
            return None
        may_end = isinstance(proposer, PacedProposer) or isinstance(policy, ConfidentChain)
        steps = min(self._max_depth, _AHEAD if may_end else _MOST_AHEAD)
        tokens = [self._embeddable(each) for each in new]
        first = self._chains_begun(begun, rows, tokens, steps)
        if first is None:
            first = self.context.run_ahead(Ahead(rows, tokens, steps, vocab))
        if first is None:
            return None
        self._steps, self.can_begin = steps, isinstance(self._drafter.model.executor, GraphExecutor)
        levels = list(first[:, :, None])  # [A, 1, V]

        def run(frontier: Frontier) -> Tensor:
            if frontier.depth >= len(levels):
                more = self.context.run_ahead(Ahead(rows, frontier.tokens.tolist(), steps, vocab))
                if more is None:  # a window ends in between; rows may have unlike numbers of new entries
                    parts = zip(rows, frontier.tokens.split(1), strict=True)
                    alone = [self.context.forward([row], token).logits for row, token in parts]
                    return self._shared(torch.cat(alone))
                levels.extend(more[:, :, None])
            logits: Tensor = levels[frontier.depth]
            return logits

        growth = self._shaping.begin(rows, self._numbers.get([each[-1] for each in new]), proposer)
        tree = grow(policy, growth, levels[0], run, limit, rows)
        self.context.commit(rows, [range(len(each)) for each in tokens], tokens)
        return tree

    def _chains_begun(self, begun: Begun, rows: Rows, tokens: Emitted, steps: int) -> Tensor | None:
        """The logits of chains that were begun after these tokens, if they were."""
        places = None if begun.made is None else begun.places(rests([self.context.cache], rows, steps))
        if places is None:
            return None
        self.context.add_pending(rows, [len(new) + steps - 1 for new in tokens])
        logits: Tensor = begun.made
        return logits[:, self._numbers.get(places)] if places else logits

    @torch.inference_mode()
    def begin_next(self, rows: Rows, tree: DraftTree, verdict: Verdict) -> None:
        device = self._drafter.model.device
        tokens, counts = verdict.emitted(tree.tokens)
        unread = Unread(tokens.masked_fill(tokens >= self._num_embeddings, 0).to(device), counts.to(device))
        if self._limit is not None:
            capture = self._capture(rows, unread, TopProposer(), self._limit)
            self._next = Begun() if capture is None else capture.begin(unread)
            return
        made = self.context.run_ahead(Ahead(rows, unread, self._steps, self._drafter.vocab_size))
        if made is not None:
            self._next = Begun(rests([self.context.cache], rows, self._steps), made)

    def run(
        self,
        rows: Rows,
        new: Emitted,
        others: Sequence[tuple[int, ...]] = (),
        *,
        every: bool = False,
        commits: bool = True,
        masks: Sequence[int] = (),
    ) -> list[Tensor]:
        """Run the tokens that rows emitted, and commit their entries.

        Args:
            others: integers that are sent to the device with those of this step.
            every: return logits after every token rather than from the last on.
            masks: tokens that run after those of every row, and whose entries are dropped.

        Shapes: returns ``[n, V]``.
        """
        roots = tuple(tokens[-1] for tokens in new)
        after = self.context.numbers_of(rows, [len(tokens) for tokens in new])
        groups: dict[int, list[int]] = {}
        for place, tokens in enumerate(new):
            groups.setdefault(len(tokens), []).append(place)
        tokens_of = {
            count: tuple(token for place in places for token in (*self._embeddable(new[place]), *masks))
            for count, places in groups.items()
        }
        rows_of = {count: [rows[place] for place in places] for count, places in groups.items()}
        needed = [each for own in rows_of.values() for each in self.context.numbers_of(own)]
        self._numbers.send([*tokens_of.values(), *needed, roots, *after, *others])
        blocks: list[TokenBlock] = []
        for count, own in rows_of.items():
            numbers = self._numbers.get(tokens_of[count])
            block = self.context.block(own, numbers.view(len(own), -1))
            blocks.append(replace(block, logits_from=0 if every else count - 1))
        logits_of: list[Tensor] = [torch.empty(0)] * len(rows)
        for places, output in zip(groups.values(), self.context.run(blocks), strict=True):
            for place, logits in zip(places, self._shared(output.logits), strict=True):
                logits_of[place] = logits
        if commits:
            every_entry = [range(len(tokens)) for tokens in new]
            self.context.commit(rows, every_entry, [self._embeddable(tokens) for tokens in new])
        return logits_of

    def draft(
        self,
        rows: Rows,
        new: Emitted,
        logits: Sequence[Tensor],
        proposer: Proposer,
        limit: int,
    ) -> DraftTree:
        roots = self._numbers.get([tokens[-1] for tokens in new])
        growth, guide = self._shaping.begin(rows, roots, proposer), proposer.guide
        levels: list[tuple[int, int]] = []

        def run(frontier: Frontier) -> Tensor:
            running = rows if frontier.rows is None else frontier.rows
            if guide is not None and guide.splices:
                return self._spliced(running, guide.spliced(roots.device, self._drafter.model.row_bytes > 0))
            return self._level(running, frontier, levels)

        first = torch.stack([each[-1:] for each in logits])
        tree = grow(self._drafter.policy, growth, first, run, limit, rows, guide)
        self.context.cache.drop(rows)
        return tree

    def _level(self, rows: Rows, frontier: Frontier, levels: list[tuple[int, int]]) -> Tensor:
        """Run a frontier after ``levels``, as of `_depth`, to which it is added; its logits ``[A, W, V]``."""
        levels.append((frontier.depth - 1, frontier.tokens.shape[1]))
        depths = None if frontier.attention_mask is None else self._depth(tuple(levels))  # None: of a chain
        return self._shared(self.context.forward(rows, frontier.tokens, frontier.attention_mask, depths).logits)

    def _spliced(self, rows: Rows, parts: Sequence[Spliced]) -> Tensor:
        """Run a frontier with what is forced after its nodes; returns ``[A, W, V]`` after that."""
        blocks = [
            self.context.block([rows[number] for number in part.numbers], part.tokens, part.attention_mask, part.depth)
            for part in parts
        ]
        logits_of: list[Tensor] = [torch.empty(0)] * len(rows)
        for part, output in zip(parts, self.context.run(blocks), strict=True):
            for number, logits in zip(part.numbers, at_nodes(self._shared(output.logits), part.last), strict=True):
                logits_of[number] = logits
        return torch.stack(logits_of)

    def observe(
        self, rows: Rows, tree: DraftTree, scores: Tensor, verdict: Verdict, output: ForwardOutput, drafted: bool
    ) -> None:
        if drafted:
            self._shaping.observe(rows, verdict.on_proposed(tree))
        else:
            self._next = Begun()

    def signals(self, rows: Rows) -> list[Signals]:
        return signals_of(self._shaping, rows)

    def _embeddable(self, ids: Sequence[int]) -> list[int]:
        """The ids with 0 for those without an embedding in the drafter (padding of a larger vocabulary)."""
        return [token if token < self._num_embeddings else 0 for token in ids]

    def _shared(self, logits: Tensor) -> Tensor:
        return logits[..., : self._drafter.vocab_size]

    def _depth(self, levels: tuple[tuple[int, int], ...]) -> Tensor:
        """``[1, F]`` depths of the entries of these levels, each given as (depth, width)."""
        if levels not in self._depths:
            depths = [[depth for depth, width in levels for _ in range(width)]]
            self._depths[levels] = on_device(depths, self._drafter.model.device)
        return self._depths[levels]


def is_later_turn(earlier: Prompt, prompt: Prompt) -> bool:
    """Whether a prompt is a later turn of the same conversation: it begins with the earlier one, media included.

    Any other is a new prompt, even if a template makes both begin alike; so is the same prompt again.
    """
    if len(prompt) <= len(earlier) or prompt.ids[: len(earlier)] != earlier.ids:
        return False
    first_media = prompt.media[: len(earlier.media)]  # later turns may bring more
    return [medium.digest for medium in first_media] == [medium.digest for medium in earlier.media]


def mask_token(config: Any) -> int:
    """Return the token that a draft model reads in place of draft tokens (PARD); `ModelError` without a usable one."""
    token, size = _named_mask(config), config.get_text_config(decoder=True).vocab_size
    if token is None:
        raise ModelError(
            "Method pard needs a draft model that was trained with a mask token, but the configuration of "
            f"{config.name_or_path or 'this model'} names no pard_token; choose another drafter, or method auto."
        )
    if type(token) is not int or not 0 <= token < size:
        raise ModelError(
            f"The pard_token of {config.name_or_path or 'this model'} is {token!r}, which is not a whole number from 0 "
            f"to {size - 1}, a token of its vocabulary; download its config.json again."
        )
    return token


def drafts_in_parallel(config: Any) -> bool:
    """Whether a configuration is that of a draft model with a mask token, which method pard can run."""
    return _named_mask(config) is not None


def _named_mask(config: Any) -> Any:
    parts = (config, config.get_text_config(decoder=True))
    return next((token for part in parts if (token := getattr(part, "pard_token", None)) is not None), None)
