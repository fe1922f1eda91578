"""Drafts from a request: the tokens that its grammar forces or nearly forces, and the answer that it predicts.

They are made on the host, and the engine joins them to the tree of any drafter. A forced token is certain and costs no
draft: a draft model runs it together with the token before it, and the joined tree has it below that token.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.draft.best_first import NODE
from saccade.draft.drafter import DrafterFacts
from saccade.draft.lookup import tree_of
from saccade.draft.prediction import Prediction
from saccade.draft.trees.policy import Frontier, Spliced
from saccade.grammar import Place, masked
from saccade.target_model.cache import on_device, to_device
from saccade.tree import DraftTree, Rows
from saccade.verify.rule import RowProcessing

MOST = 64  # most nodes of a tree that come from the request, and most forced tokens that a draft model runs in a step
WIDEST = 16  # most children of a node
SPARE = 6  # nodes by which trees of one group may differ: on a CPU, a further group costs about as much as these
DRAFTED, LATELY = 6.0, 0.9
"""Tokens that a drafter is expected to bring before it is known, and how much less a step counts after the next."""
LISTED, BRANCHES = 1500, 8  # most tokens at a place that are looked at one by one, and most that are drafted
SURE, GUESSED, SPLIT = 0.95, 0.9, 0.5
"""Share of a single longest token, of the tokenizer's usual spelling of what has to follow, and of that next to others;
92 % of the tokens of seven schemas with two vocabularies were spelled so."""


def options(place: Place) -> list[tuple[int, float]]:
    """The likely tokens at a place, where the grammar leaves few, with their probabilities."""
    if place.run:
        return [(place.run[0], 1.0)]
    longest: list[int] = []
    if place.count <= LISTED:
        longest = _longest(place)
    if len(longest) == 1:
        return [(longest[0], SURE)]
    guess = next(iter(place.guess), None)
    if guess is not None and (guess in longest or not place.allows(guess)):
        guess = None
    if 1 < len(longest) <= BRANCHES:
        share = (SURE if guess is None else SURE - SPLIT) / len(longest)
        return [*([] if guess is None else [(guess, SPLIT)]), *((token, share) for token in longest)]
    return [] if guess is None else [(guess, GUESSED)]


def _longest(place: Place) -> list[int]:
    """The allowed tokens that are no beginning of another one."""
    bits = np.unpackbits(place.packed, bitorder="little")
    words = sorted((place.spelling(token), token) for token in np.flatnonzero(bits).tolist())
    following = [*(word for word, _ in words[1:]), b""]
    return [
        token
        for (word, token), after in zip(words, following, strict=True)
        if not word or word == after or not after.startswith(word)
    ]


class HostTree:
    """A row's draft tree while it grows on the host, from the request's drafts and the drafter's nodes."""

    def __init__(self, root: int, place: Place | None, ends: Container[int], most: int, deepest: int) -> None:
        self._ends, self._most, self._deepest = ends, most, deepest
        self._widths = [0]  # children of every node
        self.nodes: list[tuple[int, int]] = [(root, 0)]  # token and parent, as `tree_of` takes them
        self.sources = [-1]  # node of the drafter's tree; -1 for others
        self.predicted: set[int] = set()  # nodes copied from the expected text alone
        self._depths, self._places = [0], [place]
        self._known: dict[tuple[int, int], int] = {}

    def add(self, parent: int | None, token: int, always: bool = False) -> int | None:
        """Return the node of a token below another one, which may be known.

        None where it cannot be emitted, unless it is drawn and added ``always``, or where the tree is full.
        """
        if parent is None:
            return None
        node = self._known.get((parent, token))
        if node is not None:
            return node
        place = self._places[parent]
        below = None if place is None or token in self._ends else place.ahead(token)
        is_legal = place is None or below is not None or (token in self._ends and place.allows(token))
        if not (is_legal or always) or (parent and self.nodes[parent][0] in self._ends):
            return None
        if len(self.nodes) > self._most or self._depths[parent] >= self._deepest or self._widths[parent] >= WIDEST:
            return None
        node = self._known[parent, token] = len(self.nodes)
        self.nodes.append((token, parent))
        self._widths[parent] += 1
        self._widths.append(0)
        self.sources.append(-1)
        self._depths.append(self._depths[parent] + 1)
        self._places.append(below)
        return node

    def add_run(self, node: int) -> int:
        """Add the tokens that are forced after a node, as far as there is room; return the last one."""
        while (place := self._places[node]) is not None and place.run:
            for token in place.run:
                below = self.add(node, token)
                if below is None:
                    return node
                node = below
        return node

    def add_drafted(
        self, base: int, tokens: Sequence[int], parents: Sequence[int], *, spliced: bool, drawn: bool
    ) -> list[int | None]:
        """Add a drafter's tree, whose root is the node ``base``; return the node after which its nodes' children are.

        ``spliced``: after what is forced after them, which the drafter left out. ``drawn``: every token is kept.
        """
        after: list[int | None] = [base]
        self.sources[base] = 0
        for number in range(1, len(tokens)):
            node = self.add(after[parents[number]], tokens[number], always=drawn)
            if node is not None:
                self.sources[node] = number
                end = self.add_run(node)
                node = end if spliced else node
            after.append(node)
        return after

    def is_forced(self, node: int) -> bool:
        """Whether a node's token is the only one that is allowed."""
        token, parent = self.nodes[node]
        place = self._places[parent]
        return node > 0 and place is not None and place.run[:1] == (token,)

    @property
    def drafted(self) -> int:
        """Nodes of the drafter's tree that are in it."""
        return sum(source > 0 for source in self.sources)

    @property
    def requested(self) -> int:
        """Nodes below the root that come from the request alone."""
        return len(self.nodes) - 1 - self.drafted

    def accepted(self, path: Sequence[int]) -> int:
        """How many of them are on a path."""
        return sum(self.sources[node] > 0 for node in path)

    def add_branches(self, starts: Sequence[tuple[int, float]]) -> None:
        """Add the likeliest tokens where the grammar leaves few, best first, after nodes of these probabilities.

        As many as raise the expected tokens of a pass over its time.
        """
        number = itertools.count()
        heap: list[tuple[float, int, int, int]] = []  # minus the probability, a number, parent, token
        expected = 1 + self._depths[starts[0][0]] + sum(likely for _, likely in starts[1:])

        def push(node: int, likely: float) -> None:
            place = self._places[node]
            for token, share in () if place is None else options(place):
                heappush(heap, (-likely * share, next(number), node, token))

        for start in starts:
            push(*start)
        while heap:
            negative, _, parent, token = heappop(heap)
            count = len(self.nodes)
            if -negative * (1 + NODE * count) < NODE * expected:
                return
            node = self.add(parent, token)
            if node is not None and len(self.nodes) > count:
                end = self.add_run(node)
                expected -= negative * (len(self.nodes) - count)
                push(end, -negative)


class RequestDrafts:
    """One request's drafts, of its grammar and its predicted answer."""

    def __init__(self, processing: RowProcessing, prediction: Prediction | None, prompt: int) -> None:
        self._processing, self._prediction = processing, prediction
        self._read = prompt  # tokens, the prompt's included, that the prediction has taken in
        self._remaining = 0
        self._copies: list[tuple[int, int, float]] = []
        self._has_copied = False  # whether they are in this step's tree
        self._others, self._steps = DRAFTED, 1.0  # tokens that steps without them have brought, and these steps
        self.place: Place | None = None  # of the root; None without a grammar
        self.run: list[int] = []  # tokens that are forced after the root, as many as can be emitted
        self.end: Place | None = None  # place after them; None where nothing follows

    @property
    def stops(self) -> Container[int]:
        """Tokens that end the row."""
        return self._processing.ends

    @property
    def suffices(self) -> bool:
        """Whether a drafter would add nothing: what is forced fills the step, or the expected text brings more."""
        is_whole = bool(self.run) and (self.run[-1] in self.stops or len(self.run) >= min(MOST, self._remaining))
        return is_whole or sum(likely for *_, likely in self._copies) > self._others / self._steps

    def begin(self, ids: Sequence[int], remaining: int) -> None:
        """Take in the tokens so far, ahead of a step, and how many may follow."""
        self._remaining = remaining
        self.run = []
        for grammar in self._processing.grammars[:1]:
            self.place = place = self._processing.states_after(ids)[grammar]
            while place is not None and len(self.run) < min(MOST, remaining) and place.run:
                token = place.run[0]
                self.run.append(token)
                place = None if token in self._processing.ends else place.ahead(token)
            self.end = place
        if self._prediction is not None:
            new = ids[self._read :]
            if new and not self._has_copied:
                self._others, self._steps = LATELY * self._others + len(new) - 1, LATELY * self._steps + 1
            self._prediction.observe(new)
            self._read, self._has_copied = len(ids), False
            self._copies = self._prediction.draft(remaining)

    def tree(self, root: int, nodes: int, levels: int) -> tuple[HostTree, int]:
        """Return this step's tree, which a drafter may add nodes to, with what is forced, and the last of that."""
        tree = HostTree(root, self.place, self._processing.ends, nodes + MOST, min(levels + MOST, self._remaining))
        base = 0
        for token in self.run:
            base = tree.add(base, token) or base
        return tree, base

    def grown(self, root: int) -> HostTree:
        """Return this step's tree without a drafter."""
        tree, base = self.tree(root, 0, 0)
        starts, copied = [(base, 1.0)], [0]
        self._has_copied = bool(self._copies)
        for token, parent, likely in self._copies:
            above = copied[parent]
            before = len(tree.nodes)
            node = None if above < 0 else tree.add(above, token)
            copied.append(-1 if node is None else node)
            if node is not None:
                if len(tree.nodes) > before:
                    tree.predicted.add(node)
                starts.append((tree.add_run(node), likely))
        tree.add_branches(starts)
        return tree


def join(
    requests: Sequence[RequestDrafts],
    proposed: DraftTree,
    roots: Sequence[int],
    lengths: Sequence[int] | None,
    facts: DrafterFacts,
    *,
    spliced: bool,
) -> tuple[DraftTree, list[HostTree]]:
    """Join a drafter's trees with the requests' drafts; return the trees on their device and on the host.

    Args:
        lengths: of the chains that the rows keep; None for all that was drafted.
        facts: of the drafter, whose roots are the last forced tokens, not the rows' last tokens, where it is early.
        spliced: as of `HostTree.add_drafted`.
    """
    batch, device = proposed.tokens.shape[0], proposed.tokens.device
    columns = [column.expand(batch, -1) for column in (proposed.tokens, proposed.parents, proposed.valid)]
    tokens, parents, valid = torch.stack(columns).tolist()
    trees, after = [], []
    for row, (drafts, root) in enumerate(zip(requests, roots, strict=True)):
        count = sum(valid[row]) if lengths is None else lengths[row] + 1
        tree, base = drafts.tree(root, facts.max_nodes, facts.max_depth)
        nodes = tree.add_drafted(
            base if facts.is_early else 0,
            tokens[row][:count],
            parents[row][:count],
            spliced=spliced,
            drawn=proposed.q is not None,
        )
        trees.append(tree)
        after.append(nodes)
    whole = tree_on(trees, device)
    if proposed.q is not None:
        whole.q = _drawn_from(trees, after, proposed.q)
    return whole, trees


def tree_on(trees: Sequence[HostTree], device: torch.device) -> DraftTree:
    """The trees of some rows on a device."""
    joined = tree_of([tree.nodes for tree in trees], device)
    sources = [[*tree.sources, *[-1] * (joined.size - len(tree.sources))] for tree in trees]
    joined.sources = on_device(sources, device)
    return joined


def alike(sizes: Sequence[int]) -> list[list[int]]:
    """Places of trees in groups, in which none is more than `SPARE` nodes larger than another one."""
    groups: list[list[int]] = []
    for place in sorted(range(len(sizes)), key=sizes.__getitem__):
        if not groups or sizes[place] > sizes[groups[-1][0]] + SPARE:
            groups.append([])
        groups[-1].append(place)
    return [sorted(places) for places in groups]


def _drawn_from(trees: Sequence[HostTree], after: Sequence[Sequence[int | None]], q: Tensor) -> Tensor:
    """Distributions ``[B, N, V]`` of joined trees' children: the drafter's, and certainty for forced tokens.

    The drafter may not know these.
    """
    size = max(len(tree.nodes) for tree in trees)
    tokens = max(
        (token for tree in trees for node, (token, _) in enumerate(tree.nodes) if tree.is_forced(node)), default=0
    )
    joint = q.new_zeros(len(trees), size, max(tokens + 1, q.shape[2]))
    for row, (tree, nodes) in enumerate(zip(trees, after, strict=True)):
        for source, node in enumerate(nodes):
            if node is not None and source < q.shape[1]:
                joint[row, node, : q.shape[2]] = q[row, source]
        for node, (token, parent) in enumerate(tree.nodes):
            if tree.is_forced(node):
                joint[row, parent] = 0
                joint[row, parent, token] = 1
    return joint


Seen = np.ndarray[Any, np.dtype[np.bool_]]


class GrammarGuide:
    """The grammars of some rows while a drafter grows their trees.

    The drafter's logits are masked, and the tokens that are forced after a node run together with it.
    """

    def __init__(self, requests: Mapping[int, RequestDrafts], rows: int, *, early: bool, splices: bool) -> None:
        self._rows, self.splices = rows, splices
        self._ends = {row: drafts.stops for row, drafts in requests.items()}
        self._starts = {row: drafts.end if early else drafts.place for row, drafts in requests.items()}
        self._slots: Rows = []

    def begin(self, slots: Rows) -> None:
        """Begin the trees of some slots of the drafter, each of which belongs to the row of its number."""
        self._slots = [slot % self._rows for slot in slots]
        # Places after the frontier's nodes, and after every node run.
        self._at: list[list[Place | None]] = [[self._starts.get(row)] for row in self._slots]
        self._ran: list[list[Place | None]] = [[] for _ in self._slots]
        self._paths: list[list[list[int]]] = [[] for _ in self._slots]  # columns of its path's tokens
        self._depths: list[list[int]] = [[] for _ in self._slots]  # of every column
        self._left = [MOST for _ in self._slots]

    def masked(self, logits: Tensor) -> Tensor:
        """Return the logits ``[A, W, V]`` of the frontier's nodes with -inf for what is not allowed after them."""
        flat = [place for places in self._at for place in places]
        width = len(flat) // len(self._at)
        wanted = [
            number for number, place in enumerate(flat) if place is not None and _is_drafted(place, logits.shape[2])
        ]
        if not wanted:
            return logits
        scores = logits.expand(-1, width, -1).float().flatten(0, 1)
        at = on_device(wanted, scores.device)
        chosen = masked(scores[at], [place for number in wanted if (place := flat[number]) is not None])
        scores = chosen if len(wanted) == len(flat) else scores.index_copy(0, at, chosen)
        return scores.view(len(self._at), width, -1)

    def advance(self, frontier: Frontier) -> None:
        """Take in the next nodes of the trees."""
        tokens = self._tokens = frontier.tokens.tolist()
        seen = None if frontier.attention_mask is None else frontier.attention_mask.tolist()
        valid = [[True] * len(row) for row in tokens] if frontier.valid is None else frontier.valid.tolist()
        self._parents = []
        for number, row in enumerate(self._slots):
            known, places, above = self._ran[number], [], []
            for place, token in enumerate(tokens[number]):
                mask = [True] * len(known) if seen is None else seen[number if len(seen) > 1 else 0][place]
                parent = max((entry for entry in range(len(known)) if mask[entry]), default=-1)
                start = self._starts.get(row) if parent < 0 else known[parent]
                goes_on = start is not None and valid[number][place] and token not in self._ends[row]
                places.append(start.ahead(token) if start is not None and goes_on else None)
                above.append(parent)
            self._at[number] = places
            self._parents.append(above)
        if not self.splices:
            for number, places in enumerate(self._at):
                self._ran[number] += places

    def spliced(self, device: torch.device, apart: bool) -> list[Spliced]:
        """Return what a draft model runs for these nodes: their tokens, and what is forced after each.

        ``apart``: every tree by itself, as a model with recurrent states needs the same trees together at every level.
        """
        parts: dict[tuple[int, ...], list[tuple[int, list[int], Seen, list[int]]]] = {}
        for number, drafted in enumerate(self._tokens):
            columns, depths = self._paths[number], self._depths[number]
            ids, paths, last = list[int](), [], []
            for place, token in enumerate(drafted):
                parent = self._parents[number][place]
                path = columns[parent] if parent >= 0 else []
                for each in (token, *self._run_of(number, place)):
                    path = [*path, len(depths)]
                    depths.append(len(path) - 1)
                    ids.append(each)
                    paths.append(path)
                columns.append(path)
                last.append(len(ids) - 1)
            self._ran[number] += self._at[number]
            seen = np.zeros((len(ids), len(depths)), bool)
            for line, path in zip(seen, paths, strict=True):
                line[path] = True
            parts.setdefault((*seen.shape, number * apart), []).append((number, ids, seen, last))
        return [self._on_device(part, device) for part in parts.values()]

    def _on_device(self, part: Sequence[tuple[int, list[int], Seen, list[int]]], device: torch.device) -> Spliced:
        numbers, ids, seen, last = zip(*part, strict=True)
        depths = [self._depths[number] for number in numbers]
        mask = to_device(torch.from_numpy(np.stack(seen)), device)
        return Spliced(numbers, on_device(ids, device), mask, on_device(depths, device), on_device(last, device))

    def _run_of(self, number: int, place: int) -> list[int]:
        """The tokens forced after a node, after which it then is."""
        at, run = self._at[number][place], list[int]()
        while at is not None and at.run:
            token = at.run[0]
            if token in self._ends[self._slots[number]] or not self._left[number]:
                at = None
                break
            self._left[number] -= 1
            run.append(token)
            at = at.ahead(token)
        self._at[number][place] = at
        return run


def _is_drafted(place: Place, count: int) -> bool:
    """Whether a drafter of so many tokens knows one that is allowed at a place."""
    if place.run:
        return place.run[0] < count
    packed = place.packed
    return 8 * len(packed) <= count or bool(np.unpackbits(packed, count=count, bitorder="little").any())
