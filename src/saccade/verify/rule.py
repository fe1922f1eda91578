"""Acceptance rules: the protocol and its verdict, the lossless rules, and logits processors at every tree node."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.grammar import Rollback
from saccade.inputs.families.family import Prompt
from saccade.processors import PREFIX_FREE, is_stateful, process
from saccade.target_model.cache import on_device, to_device
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.token_blocks import ForwardOutput
from saccade.tree import DraftTree, Rows, at_nodes

STRICT, LOOSE, SHIFTED = range(3)
"""Marks of accepted draft tokens: the target's own token; accepted by a loose rule; or by position-shift tolerance,
because the target's token occurs elsewhere in the draft."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one verification pass."""

    path: Tensor  # [B, D + 1] node indices from the root down to the last accepted node, then zeros
    count: Tensor  # [B] accepted nodes, the root not counted
    token: Tensor  # [B] the target's own token after the path (correction or bonus)
    marks: Tensor | None = None  # [B, D + 1] how each node was accepted (`STRICT`, ...); None when all are strict
    # per row the path and the token, where they were decided on the host; `replace` leaves it out
    host: Sequence[tuple[list[int], int]] | None = field(default=None, init=False)

    def emitted(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``[B, D + 1]`` after the roots of trees, of nodes ``[B, N]``; the first ``[B]`` of each count."""
        path = tokens.gather(1, self.path)
        after = torch.cat([path[:, 1:], path[:, :1]], 1)
        return after.scatter(1, self.count[:, None], self.token[:, None]), self.count + 1

    @classmethod
    def on_host(cls, decided: Sequence[tuple[list[int], int]], max_depth: int) -> Verdict:
        """The verdict of every row's path and token, in CPU tensors as well."""
        rows = [[token, len(path) - 1, *path, *[0] * (max_depth + 1 - len(path))] for path, token in decided]
        numbers = torch.tensor(rows)
        verdict = cls(numbers[:, 2:], numbers[:, 1], numbers[:, 0])
        object.__setattr__(verdict, "host", decided)
        return verdict

    @classmethod
    def without_draft(cls, choice: Tensor) -> Verdict:
        """The verdict on trees of a root alone, from the target's tokens ``[B, 1]``."""
        zeros = torch.zeros_like(choice)
        return cls(zeros, zeros[:, 0], choice[:, 0])

    def on_proposed(self, tree: DraftTree) -> Verdict:
        """The same on the drafter's own tree, of which a joined one has nodes (`DraftTree.sources`)."""
        if tree.sources is None:
            return self
        own = tree.sources.gather(1, self.path)
        width = own.shape[1]
        kept = (own >= 0) & (torch.arange(width, device=own.device) <= self.count[:, None])
        place = torch.where(kept, kept.cumsum(1) - 1, width)
        path = own.new_zeros(len(own), width + 1).scatter_(1, place, own.clamp(min=0))[:, :width]
        return Verdict(path, (kept.sum(1) - 1).clamp(min=0), self.token)


class Judge(Protocol):
    """A rule's state for the rows of one session."""

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        """Take in a row's prompt after the target's prefill, with the hidden states that the rule requested."""

    def judge(
        self, rows: Rows, tree: DraftTree, scores: Tensor, uniforms: Tensor | None, output: ForwardOutput
    ) -> Verdict:
        """Accept or reject the draft tokens of some rows.

        Args:
            tree: one tree per row.
            scores: ``[A, N, V]`` the target's processed logits after every node.
            uniforms: ``[A, L, C]`` this step's random numbers in [0, 1), as many as `Rule.uniforms` returns; None if
                it needs none. Which number decides on a node must depend on that row's tree alone.
            output: the target's forward over the trees' nodes.
        """


class Rule(Protocol):
    """An acceptance rule."""

    @property
    def lossless(self) -> bool:
        """Whether the output is distributed exactly as the target's own."""

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled (and the drafter may draw its children)."""

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        """L levels of C random numbers that `Judge.judge` needs per row and step, for the drafter's bounds."""

    def open(self, context: Context) -> Judge:
        """Start a session; a rule that reads hidden states requests them here (``context.requirements``)."""


class StatelessRule:
    """Base of rules that need neither a prompt's states nor random numbers: the rule is its own judge."""

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        return 0, 0

    def open(self, context: Context) -> Self:
        return self

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        """No state depends on the prompt."""


def path_to(tree: DraftTree, node: Tensor) -> Tensor:
    """``[B, D + 1]`` node indices from the root to ``node`` ``[B]``, then zeros."""
    batch, count = tree.tokens.shape
    rows = torch.arange(batch, device=node.device)
    above = tree.ancestors.expand(batch, -1, -1)[rows, node]  # [B, N]
    bin_ = tree.max_depth + 1  # nodes off the path go to a column that is cut off
    places = torch.where(above, tree.depth, bin_)
    nodes = torch.arange(count, device=node.device).expand(batch, -1)
    return node.new_zeros(batch, bin_ + 1).scatter_(1, places, nodes)[:, :bin_]


def draft_nodes(tree: DraftTree) -> Tensor:
    """``[B, N]`` True for draft tokens: neither root nor padding."""
    is_draft = tree.valid.expand(tree.tokens.shape[0], -1).clone()
    is_draft[:, 0] = False
    return is_draft


def deepest(tree: DraftTree, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Depth and index ``[B]`` of the deepest node below which and at which all are ``accepted`` ``[B, N]``."""
    accepted[:, 0] = True
    stands = (accepted[:, None] | ~tree.ancestors).all(-1)
    count, node = torch.where(stands, tree.depth, -1).max(1)
    return count, node


def likeliest(scores: Tensor) -> Tensor:
    """Tokens ``[B, N]`` of the largest scores ``[B, N, V]``, the first of equal ones."""
    if scores.is_cpu and scores.dtype.itemsize <= 4:  # numpy's is several times as fast, in float32
        return torch.from_numpy(scores.detach().float().numpy().argmax(-1))
    return scores.max(-1).indices


def _on_host(tree: DraftTree) -> tuple[Iterable[list[int]], ...]:
    """Tokens, parents and validity of every row's nodes."""
    return tree.tokens.tolist(), cycle(tree.parents.tolist()), cycle(tree.valid.tolist())


def _accepted(tokens: list[int], parents: list[int], valid: list[bool], choice: list[int]) -> tuple[list[int], int]:
    """The longest path of a row's tree on which each node is what the target chose after its parent, and its token."""
    depth, last = [0, *[-1] * (len(tokens) - 1)], 0  # -1: not accepted
    for node in range(1, len(tokens)):
        parent = parents[node]
        if depth[parent] >= 0 and tokens[node] == choice[parent] and valid[node]:
            depth[node] = depth[parent] + 1
            if depth[node] > depth[last]:
                last = node
    path = [last]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path, choice[last]


class Greedy(StatelessRule):
    """Lossless for greedy decoding: the output is the target's own, token for token."""

    lossless = True
    samples = False

    def judge(
        self, rows: Rows, tree: DraftTree, scores: Tensor, uniforms: Tensor | None, output: ForwardOutput
    ) -> Verdict:
        choice = likeliest(scores)
        if choice.is_cpu:
            return Verdict.on_host([*map(_accepted, *_on_host(tree), choice.tolist())], tree.max_depth)
        if tree.size == 1:
            return Verdict.without_draft(choice)
        wanted = choice.gather(1, tree.parents.expand_as(choice))
        count, node = deepest(tree, (tree.tokens == wanted) & tree.valid)
        token = choice.gather(1, node[:, None])[:, 0]
        return Verdict(path_to(tree, node), count, token)


class Sampling(StatelessRule):
    """Lossless for sampling, logits processors and the bonus token included.

    Children are tried in node order; after a rejection p becomes the normalised positive part of p - q (recursive
    rejection sampling; Leviathan et al. 2023, Section 2.3, on trees). All nodes are decided at once, as if every one of
    them were reached; the verdict is the path on which each node is its parent's accepted child.
    """

    lossless = True
    samples = True

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        """Level 0 has the last token's number, level d those of the children at depth d, each at its rank."""
        return max_depth + 1, max(max_children, 1)

    def judge(
        self, rows: Rows, tree: DraftTree, scores: Tensor, uniforms: Tensor | None, output: ForwardOutput
    ) -> Verdict:
        assert uniforms is not None
        # p: [B, N, V]; a bfloat16 sum over a vocabulary is too coarse
        p = scores.softmax(-1, torch.float32)
        last = uniforms[:, 0, 0]
        if tree.size == 1:
            return Verdict.without_draft(draw(p[:, 0], last)[:, None])
        choose = _choose_point_masses if tree.q is None else _choose_draws
        chosen, left = choose(tree, _Siblings.of(tree), p, uniforms)
        count, node = deepest(tree, chosen)
        rest = at_nodes(left, node[:, None])[:, 0]  # [B, V]
        return Verdict(path_to(tree, node), count, draw(rest, last))


@dataclass(slots=True)
class _Siblings:
    """Order in which the children of every node are tried."""

    parents: Tensor  # `[B, N]`
    is_draft: Tensor  # `[B, N]` as `draft_nodes`
    earlier: Tensor  # `[B, N, N]` where j is a draft token tried before its sibling i
    rank: Tensor  # `[B, N]` draft tokens tried before a node among its siblings

    @classmethod
    def of(cls, tree: DraftTree) -> _Siblings:
        parents = tree.parents.expand_as(tree.tokens)
        is_draft = draft_nodes(tree)
        earlier = (parents[:, :, None] == parents[:, None]) & is_draft[:, None]
        earlier = earlier.tril(-1)
        return cls(parents, is_draft, earlier, earlier.sum(-1))

    def first(self, accepted: Tensor) -> Tensor:
        """Accepted nodes ``[B, N]`` without those that an earlier sibling precedes."""
        return accepted & ~(self.earlier & accepted[:, None]).any(-1)


def _choose_point_masses(tree: DraftTree, siblings: _Siblings, p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Choose a child ``[B, N]`` of every node, for point masses, by p ``[B, N, V]`` and uniforms ``[B, L, C]``.

    Where all earlier siblings are rejected, p is what they leave of it, so a child is accepted with its own share of
    the mass that it, later siblings and all other tokens have.
    """
    batch, _, vocab = p.shape
    places = siblings.parents * vocab + tree.tokens  # of every node's token in its parent's distribution
    same = places[:, :, None] == places[:, None]
    repeated = (siblings.earlier & same).any(-1)
    by_node = p.view(batch, -1)
    mass = torch.where(siblings.is_draft & ~repeated, by_node.gather(1, places), 0.0)  # [B, N]
    # The root and padding nodes, whose places mean nothing, leave p as it is.
    left = torch.where(siblings.is_draft, 0.0, torch.inf)
    by_node.scatter_reduce_(1, places, left, "amin")
    # Added up from the last sibling on: a difference from one would lose what little may be left.
    following = torch.where(siblings.earlier, mass[..., None], 0.0).sum(1)
    remaining = p.sum(-1).gather(1, siblings.parents) + following + mass
    at = tree.depth * uniforms.shape[2] + siblings.rank
    accepted = uniforms.flatten(1).gather(1, at) * remaining < mass
    return siblings.first(accepted), p


def _choose_draws(tree: DraftTree, siblings: _Siblings, p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Choose a child of every node, for children drawn from q; arguments and result as in `_choose_point_masses`."""
    assert tree.q is not None
    batch, count, vocab = p.shape
    nodes = torch.arange(count, device=p.device)
    is_child = (siblings.parents[:, None] == nodes[:, None]) & siblings.is_draft[:, None]  # [B, N, children]
    level = (tree.depth + 1).clamp(max=uniforms.shape[1] - 1)  # of every node's children
    numbers = at_nodes(uniforms, level.expand(batch, -1))  # [B, N, C]
    left = p.flatten(0, 1)
    q = pad(tree.q, (0, vocab - tree.q.shape[2])).flatten(0, 1)  # the drafter's vocabulary may be smaller
    chosen = torch.zeros_like(siblings.is_draft)
    moving = chosen.flatten()
    for rank in range(tree.max_children):
        match = is_child & (siblings.rank == rank)[:, None]
        child = match.int().argmax(-1)
        open_ = match.any(-1).flatten() & ~moving
        token = tree.tokens.gather(1, child).flatten()
        accept, left, q = _try(token, numbers[..., rank].flatten(), left, q, open_)
        moving = moving | accept
        chosen = chosen | (match & accept.view(batch, count, 1)).any(1)
    left = left.view(batch, count, vocab)
    return chosen, torch.where(left.sum(-1, keepdim=True) > 0, left, p)  # rounding alone leaves nothing


def _try(token: Tensor, u: Tensor, p: Tensor, q: Tensor, open_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Try one child ``[R]`` per node where ``open_``; return (accepted, p, q) after it, of p and q ``[R, V]``."""
    at = token[:, None]
    p_token, q_token = p.gather(1, at), q.gather(1, at)
    open_ = open_[:, None] & (q_token > 0)  # q had fewer tokens than children were wanted: not a real draw
    accept = open_ & (u[:, None] * q_token < p_token)
    rejected = open_ & ~accept
    p = torch.addcmul(p, q, rejected.to(p), value=-1).clamp_(min=0)
    q = q.scatter(1, at, q_token.masked_fill(rejected, 0))
    return accept[:, 0], _normalise(p, rejected), _normalise(q, rejected)


def _normalise(weights: Tensor, where: Tensor) -> Tensor:
    """Scale rows ``where`` ``[R, 1]`` to sum one, in place; rows of zeros stay."""
    total = weights.sum(-1, keepdim=True)
    return weights.div_(torch.where(where & (total > 0), total, 1.0))


class Uniforms:
    """One step's uniform numbers in [0, 1), drawn for each row by its own generator.

    The rule's numbers come first and are indexed by level and rank; the proposer's follow and are taken in turn. So
    none moves when a neighbour's deeper or wider tree takes more.
    Shapes: judging ``[B, L, C]``.
    """

    def __init__(
        self,
        generators: Sequence[torch.Generator],
        judging: tuple[int, int],
        drafting: int,
        device: torch.device,
    ) -> None:
        levels, width = judging
        own = levels * width
        count = own + drafting
        drawn = torch.stack([torch.rand(count, generator=g, dtype=torch.float64) for g in generators])
        below_one = drawn.to(torch.float32).clamp_(max=1 - 2**-24)
        values = to_device(below_one, device)
        self.judging = values[:, :own].view(-1, levels, width)
        self._drafting = values[:, own:]
        self._used = 0

    def pop(self, count: int) -> Tensor:
        """Return the next ``[B, count]`` numbers for the proposer."""
        start, self._used = self._used, self._used + count
        drawn = self._drafting.shape[1]
        if self._used > drawn:
            raise IndexError(f"Only {drawn} uniform numbers per row were drawn for this step's draft tokens.")
        return self._drafting[:, start : self._used]


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Sample ``[R]`` by inverting the cumulative ``[R, V]`` weights; a token of weight zero is never drawn."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    wanted = uniform[:, None] * total  # below the total, because uniform is at most 1 - 2**-24
    index = torch.searchsorted(cumulative, wanted, right=True).clamp_(max=weights.shape[1] - 1)
    # A parallel sum may not be monotone in its last bits; the likeliest token replaces one of weight zero.
    likeliest = weights.argmax(-1, keepdim=True)
    index = torch.where(weights.gather(1, index) > 0, index, likeliest)
    return index[:, 0]


Warp = Callable[[Tensor], Tensor]
"""``[R, V]`` logits to ``[R, V]`` scores that depend on them alone."""


class RowProcessing:
    """One row's processors for its whole life, with the states of the stateful ones."""

    def __init__(self, processors: Sequence[Any], ends: Container[int] = ()) -> None:
        self.processors, self.ends = list(processors), ends
        self.prefix_free = [p for p in self.processors if type(p) in PREFIX_FREE]
        self.needs_prefix = len(self.prefix_free) < len(self.processors)
        self.settings = tuple(_settings(p) for p in self.prefix_free)
        self._stateful = [place for place, p in enumerate(self.processors) if is_stateful(p)]
        self.grammars = [place for place in self._stateful if isinstance(self.processors[place], Rollback)]
        # Whether its scores at a node depend on the grammar's state there and on the logits alone.
        self.is_form = len(self.grammars) == 1 == len(self.processors) - len(self.prefix_free)
        self._states: dict[int, Any] = {}
        self._read = 0

    def states_after(self, prefix: Sequence[int]) -> dict[int, Any]:
        """Return every stateful processor's state after a prefix, which is the prompt at first and then only grows."""
        if not self._stateful:
            return {}
        if not self._read:
            self._states = {place: self.processors[place].start(prefix) for place in self._stateful}
        else:
            for token in prefix[self._read :]:
                self._states = self.advance(self._states, token)
                self._read += 1  # one by one: after a processor's exception the call may be repeated
            for place in self.grammars:
                self.processors[place].settle(self._states[place])
        self._read = len(prefix)
        return self._states

    def advance(self, states: dict[int, Any], token: int) -> dict[int, Any]:
        """Return the states one token further."""
        return {place: self.processors[place].advance(state, token) for place, state in states.items()}

    def warp(self, logits: Tensor) -> Tensor:
        """Apply the prefix-free processors alone to float32 logits ``[R, V]``."""
        for processor in self.prefix_free:
            logits = processor(None, logits)
        return logits

    def scores(self, ids: Tensor, scores: Tensor, states: Sequence[dict[int, Any]]) -> Tensor:
        """Return scores ``[n, V]`` of n nodes with prefixes ``ids`` ``[n, S]`` and these states."""
        for place, processor in enumerate(self.processors):
            if place in self.grammars:
                scores = processor.all_scores([own[place] for own in states], scores)
            elif states and place in states[0]:
                parts = zip(states, scores, strict=True)
                processed = [processor.scores(own[place], part.clone()) for own, part in parts]
                scores = torch.stack(processed)
            else:
                scores = process(processor, ids, scores)
        return scores


class Processing:
    """The processors of the rows of one forward."""

    def __init__(self, rows: Sequence[RowProcessing]) -> None:
        self._rows = rows
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(row.settings, []).append(index)
        self._groups = list(groups.values())

    @property
    def needs_prefix(self) -> bool:
        """Whether scores of a row depend on the tokens before them."""
        return any(row.needs_prefix for row in self._rows)

    def warp(self, logits: Tensor) -> Tensor:
        """Apply the prefix-free processors alone, as a drafter does to its own logits ``[R, V]``: equally many for
        each row, row by row."""
        scores = logits.float()
        if len(self._groups) == 1:
            return self._rows[0].warp(scores)
        by_row = scores.view(len(self._rows), -1, scores.shape[-1])
        warped = torch.empty_like(by_row)
        for group in self._groups:
            at = torch.tensor(group, device=scores.device)
            part = self._rows[group[0]].warp(by_row[at].flatten(0, 1))
            warped[at] = part.view(len(group), *by_row.shape[1:])
        return warped.view_as(scores)

    def __call__(
        self,
        tree: DraftTree,
        logits: Tensor,
        prefixes: Sequence[Sequence[int]],
        room: Sequence[int] | None = None,
    ) -> Tensor:
        """Return scores ``[B, N, V]`` from logits ``[B, N, V]``.

        Processors that depend on the prefix run once per row and depth, where all prefixes have one length; the
        tree's form is then read on the host. They get only prefixes that plain decoding can reach, as they may
        have no answer to others (a constraint that nothing can continue). Nodes after a forbidden token, after one
        that ends the row, or beyond the row's room keep their logits: no lossless rule reaches them.
        """
        if not [row for row in self._rows if row.processors]:
            return logits
        if not self.needs_prefix:
            return self.warp(logits.flatten(0, 1)).view_as(logits)
        scores = logits.to(torch.float32, copy=True)  # written to below; the logits stay the caller's
        children = tree.children
        for index, row in enumerate(self._rows):
            limit = tree.max_depth + 1 if room is None else room[index]
            if not row.needs_prefix:
                scores[index] = row.warp(scores[index])
            elif limit:
                process = _process_form if row.is_form else _process_row
                process(row, prefixes[index], scores[index], children[index], limit)
        return scores


_Children = Sequence[Sequence[tuple[int, int]]]
"""Per node the nodes and tokens of its children."""


def _process_form(row: RowProcessing, prefix: Sequence[int], scores: Tensor, children: _Children, limit: int) -> None:
    """Process one row's scores ``[N, V]`` in place, those of all nodes at once, where a grammar alone has a state."""
    (grammar,) = row.grammars
    nodes, depths, places = [0], [0], [row.states_after(prefix)[grammar]]
    for number, place in enumerate(places):  # which grows
        for child, token in children[nodes[number]] if depths[number] + 1 < limit else ():
            below = None if token in row.ends else place.ahead(token)
            if below is not None:
                nodes.append(child)
                depths.append(depths[number] + 1)
                places.append(below)
    whole = nodes == list(range(len(scores)))
    at = slice(None) if whole else on_device(nodes, scores.device)
    part = scores[at]
    for number, processor in enumerate(row.processors):
        if number == grammar:
            part = processor.all_scores(places, part, first=number == 0)
        else:
            part = processor(None, part)
    scores[at] = part


def _process_row(row: RowProcessing, prefix: Sequence[int], scores: Tensor, children: _Children, limit: int) -> None:
    """Process one row's scores ``[N, V]`` in place, depth by depth down to ``limit`` - 1."""
    device = scores.device
    root_ids = torch.tensor(list(prefix), device=device)
    nodes, states = [0], [row.states_after(prefix)]
    paths: list[list[int]] = [[]]  # tokens from the root (excluded) to every node
    for _ in range(limit):
        at = torch.tensor(nodes, device=device)
        below = torch.tensor(paths, dtype=torch.long, device=device)
        ids = torch.cat([root_ids.expand(len(nodes), -1), below], 1)
        part = row.scores(ids, scores[at], states)
        scores[at] = part
        drafted = [
            (place, child, token)
            for place, node in enumerate(nodes)
            for child, token in children[node]
            if token not in row.ends and token < scores.shape[1]
        ]
        if not drafted:
            return
        places, _, tokens = (list(column) for column in zip(*drafted, strict=True))
        # Where the scores forbid everything, greedy decoding still continues with some token.
        forbidden = part[places, tokens].isneginf() & ~part.amax(1)[places].isneginf()
        reached = [each for each, is_forbidden in zip(drafted, forbidden.tolist(), strict=True) if not is_forbidden]
        if not reached:
            return
        nodes = [node for _, node, _ in reached]
        states = [row.advance(states[place], token) for place, _, token in reached]
        paths = [[*paths[place], token] for place, _, token in reached]


def _settings(processor: Any) -> tuple[Any, ...]:
    """Type and attributes of a processor: equal for two that do the same."""
    values = vars(processor).items()
    attributes = sorted((name, v.tolist() if isinstance(v, Tensor) else v) for name, v in values)
    return type(processor), repr(attributes)
