"""One step of a batch: prefill chunks and draft trees in one target forward, verdicts, and commits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, product
from math import isfinite
from operator import and_, itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.draft.request_drafts import MOST, WIDEST, GrammarGuide, HostTree, alike, join, tree_on
from saccade.draft.trees.policy import DrawProposer, PacedProposer, Proposer, TopProposer
from saccade.engine.costs import sampled_length
from saccade.engine.prefill import PrefillChunk, PromptRunner, StepSizes
from saccade.engine.row import Row
from saccade.engine.slots import BatchState, Clock, Drafting, Span
from saccade.errors import InputError, ModelError
from saccade.output import DRAFTED, TicketChunk, TreeTrace
from saccade.processors import name_of
from saccade.target_model.adapter import OneProcess
from saccade.target_model.cache import on_host
from saccade.target_model.context import Context
from saccade.target_model.sharding import Ranks
from saccade.target_model.token_blocks import ForwardOutput, TokenBlock, concat_outputs
from saccade.tree import DraftTree
from saccade.verify.rule import STRICT, Judge, Processing, Rule, Uniforms, Verdict


def pack(tree: DraftTree, verdict: Verdict, logits: Tensor, sampled: Tensor | None) -> Tensor:
    """Pack verdicts into ``[A, 4 + 4 * (D + 1)]`` integers for one transfer.

    Per row: accepted count, token, whether logits are not finite, whether the token was sampled from scores without a
    finite maximum, path nodes, path tokens, nodes of at most each depth without padding, path marks.
    Shapes: sampled ``[A, N, V]``.
    """
    unsound = _not_finite(logits.amax((1, 2)))
    barred = torch.zeros_like(unsound)
    if sampled is not None:  # only at the path's last node: nothing is accepted below it
        last = verdict.path.gather(1, verdict.count[:, None])[..., None]
        barred = _not_finite(sampled.gather(1, last.expand(-1, 1, sampled.shape[2])).amax((1, 2)))
    count, token = verdict.count[:, None], verdict.token[:, None]
    path_tokens = tree.tokens.gather(1, verdict.path)
    depths = torch.arange(verdict.path.shape[1], device=logits.device)[:, None]
    nodes = (tree.valid[:, None] & (tree.depth[:, None] <= depths)).sum(-1).expand_as(path_tokens)
    marks = torch.zeros_like(path_tokens) if verdict.marks is None else verdict.marks
    flags = [unsound[:, None], barred[:, None]]
    return torch.cat([count, token, *flags, verdict.path, path_tokens, nodes, marks], 1)


def _not_finite(values: Tensor) -> Tensor:
    """1 where values are infinite or NaN, else 0."""
    return (values - values != 0).long()


class RowVerdict(NamedTuple):
    """A row's verdict on the host."""

    token: int  # the target's own after the path
    path: list[int]  # accepted nodes, the root first
    tokens: list[int]  # of the path
    marks: list[int]  # of the path; empty where all are strict
    drafted: int  # nodes that could be emitted, the root not counted
    unsound: bool  # whether logits are not finite
    barred: bool  # whether the token was sampled from scores without a finite maximum

    @classmethod
    def of(cls, numbers: list[int], remaining: int) -> RowVerdict:
        """Read a row of `pack`; ``remaining``: its tokens that may still be emitted."""
        count, token, unsound, barred, *rest = numbers
        width = len(rest) // 4
        path, tokens, marks = (rest[at : at + count + 1] for at in (0, width, 3 * width))
        drafted = rest[2 * width + min(remaining, width - 1)] - 1  # deeper nodes serve longer rows
        return cls(token, path, tokens, marks, drafted, bool(unsound), bool(barred))


def to_host(
    decided: Sequence[Tensor | list[RowVerdict]], remaining: Sequence[list[int]]
) -> Callable[[], list[list[RowVerdict]]]:
    """Begin to transfer several groups' verdicts, all packed ones at once; the function returned waits for them."""
    packed = [part for part in decided if isinstance(part, Tensor)]
    widest = max((part.shape[1] for part in packed), default=0)
    padded = [pad(part, (0, widest - part.shape[1])) if part.shape[1] < widest else part for part in packed]
    transfer = on_host(padded[0] if len(padded) == 1 else torch.cat(padded)) if packed else list

    def read() -> list[list[RowVerdict]]:
        rows = iter(transfer())
        return [
            [RowVerdict.of(next(rows)[: part.shape[1]], left) for left in lefts] if isinstance(part, Tensor) else part
            for part, lefts in zip(decided, remaining, strict=True)
        ]

    return read


def traces(
    tree: DraftTree, paths: Sequence[Sequence[int]], signals: Sequence[Mapping[str, tuple[float, ...]]]
) -> list[TreeTrace | None]:
    """Copy every row's tree to the host without padding nodes, which are last; None for rows without a path."""
    batch = tree.tokens.shape[0]
    rows = zip(
        tree.tokens.tolist(),
        tree.parents.expand(batch, -1).tolist(),
        tree.valid.expand(batch, -1).sum(1).tolist(),
        paths,
        signals,
        strict=True,
    )
    return [
        TreeTrace(tuple(tokens[:count]), tuple(parents[:count]), tuple(path), numbers) if path else None
        for tokens, parents, count, path, numbers in rows
    ]


@dataclass(slots=True)
class VerificationGroup:
    """Rows that one rule judges together, with their trees and the target's outputs."""

    rows: list[Row]  # decoding rows first, then those whose prompts end in this step
    tree: DraftTree  # one tree per row
    rule: Rule
    judge: Judge
    processing: Processing
    uniforms: Uniforms | None
    drafted: bool  # whether a drafter proposed the trees and observes the outcome
    levels: int = 0  # that it ran, of which the trees may have fewer
    host: Sequence[HostTree] | None = None  # the trees, where drafts of the requests are in them
    request_emitted: int = 0  # tokens of these that were emitted
    output: ForwardOutput | None = None  # logits `[A, N, V]` and hidden states `[A, N, d]` of the trees' nodes
    scores: Tensor | None = None
    verdict: Verdict | None = None
    failed: dict[int, Exception] = field(default_factory=dict)  # errors of logits processors by index of the row

    @property
    def slots(self) -> list[int]:
        """Cache slots of the rows."""
        return [slot for row in self.rows if (slot := row.slot) is not None]

    def part(self, places: Sequence[int], size: int) -> VerificationGroup:
        """Some of the rows, which are not sampled, with the first ``size`` nodes of their chains."""
        return self._of(places, self.tree.cut(places, size), None)

    def of_like_sizes(self) -> list[VerificationGroup]:
        """Groups of rows whose trees are about as large, since all trees of a group are padded to the largest.

        On a CPU alone, where that takes time, and of rows that do not sample.
        """
        if self.host is None or self.uniforms is not None or not self.tree.tokens.is_cpu:
            return [self]
        groups = []
        for places in alike([len(tree.nodes) for tree in self.host]):
            host = [self.host[place] for place in places]
            groups.append(self._of(places, tree_on(host, self.tree.tokens.device), host))
        return groups

    def _of(self, places: Sequence[int], tree: DraftTree, host: Sequence[HostTree] | None) -> VerificationGroup:
        rows = [self.rows[place] for place in places]
        processing = Processing([row.processing for row in rows])
        return replace(self, rows=rows, tree=tree, processing=processing, host=host, failed={})

    def decide(self, ranks: Ranks | OneProcess) -> Tensor | list[RowVerdict]:
        """Process the logits and judge the trees; return rank 0's verdicts, packed unless they are on the host."""
        assert self.output is not None
        self.scores = self._processed(self.output.logits)
        numbers = None if self.uniforms is None else self.uniforms.judging
        self.verdict = self.judge.judge(self.slots, self.tree, self.scores, numbers, self.output)
        if self.verdict.host is not None and not ranks.is_split:
            return self._on_host(self.verdict.host)
        ours = self.verdict
        marks = [] if ours.marks is None else [ours.marks]
        _, (path, count, token, *marks) = ranks.tensors([], [ours.path, ours.count, ours.token, *marks])
        self.verdict = Verdict(path, count, token, marks[0] if marks else None)
        sampled = self.scores if self.rule.samples else None
        return pack(self.tree, self.verdict, self.output.logits, sampled)

    def _on_host(self, decided: Sequence[tuple[list[int], int]]) -> list[RowVerdict]:
        """What `pack` and `RowVerdict.of` make of paths and tokens that were chosen, not sampled, on the host."""
        assert self.output is not None
        tree, verdicts = self.tree, list[RowVerdict]()
        # One row of `valid` and `depth` may stand for all.
        trees = zip(tree.tokens.tolist(), cycle(tree.valid.tolist()), cycle(tree.depth.tolist()), strict=False)
        peaks = self.output.logits.amax((1, 2)).tolist()
        for row, (path, token), peak, (tokens, valid, depth) in zip(self.rows, decided, peaks, trees, strict=True):
            drafted = sum(map(and_, valid, map(row.remaining.__ge__, depth))) - 1
            on_path = [tokens[node] for node in path]
            verdicts.append(RowVerdict(token, path, on_path, [], drafted, not isfinite(peak), False))
        return verdicts

    def _processed(self, logits: Tensor) -> Tensor:
        prefixes, remaining = [row.ids for row in self.rows], [row.remaining for row in self.rows]
        try:
            return self.processing(self.tree, logits, prefixes, remaining)
        except Exception as error:
            if len(self.rows) == 1:
                self.failed[0] = error
                return logits
        parts = []
        for index, row in enumerate(self.rows):  # find the rows whose processors fail; the others continue
            alone, tree = Processing([row.processing]), self.tree.rows(index, index + 1)
            one = logits[index : index + 1]
            try:
                parts.append(alone(tree, one, [row.ids], [row.remaining]).float())
            except Exception as error:
                self.failed[index] = error
                parts.append(one.float())
        return torch.cat(parts)


def tree_block(context: Context, slots: Sequence[int], tree: DraftTree) -> TokenBlock:
    """Block of the trees of decoding rows; ``tree`` may hold further rows after theirs."""
    ours = tree.rows(0, len(slots))
    return context.block(slots, ours.tokens, None if tree.size == 1 else ours.ancestors, ours.depth)


def append_tree(context: Context, chunk: TokenBlock, length: int, tree: DraftTree, index: int) -> TokenBlock:
    """Append one row's tree to the last chunk of a prompt of ``length`` tokens, whose last token is the root."""
    target, count, nodes = context.target, chunk.count, tree.size - 1
    device = target.device
    one = tree.rows(index, index + 1)
    tokens, depth = one.tokens[0, 1:], one.depth[0, 1:]
    mask = torch.ones(count + nodes, count + nodes, dtype=torch.bool, device=device).tril()
    if chunk.attention_mask is not None:
        mask[:count, :count] = chunk.attention_mask[0]
    mask[count:, count:] = one.ancestors[0, 1:, 1:]
    before = torch.arange(count, device=device) if chunk.depth is None else chunk.depth[0]
    assert chunk.positions is not None
    root = chunk.positions[..., -1:]  # [3 or 1, 1, 1]
    below = target.traits.limits.clamp_positions(root.amax(0) + depth, [length], None)
    embeddings = chunk.embeddings
    if embeddings is not None:
        embeddings = torch.cat([embeddings, target.embed(tokens)[None].to(embeddings)], 1)
    return TokenBlock(
        rows=chunk.rows,
        tokens=torch.cat([chunk.tokens, tokens[None]], 1),
        attention_mask=mask[None],
        depth=torch.cat([before, before[-1] + depth])[None],
        slot_shifts=chunk.slot_shifts,
        embeddings=embeddings,
        deepstack=[pad(layer, (0, 0, 0, nodes)) for layer in chunk.deepstack],
        positions=torch.cat([chunk.positions, below[None].expand(root.shape[0], -1, -1)], 2),
        logits_from=count - 1,
        chain=count,
    )


Owner = PrefillChunk | VerificationGroup
Commit = tuple[int, list[int], list[int]]
"""A row's slot, its committed ones among the pending entries, and their tokens."""


class StepRunner:
    """One step of a running batch: plan, draft, run the target, judge, emit, and observe the times."""

    def __init__(
        self, state: BatchState, sizes: StepSizes, number: int, trace: bool, meanwhile: Callable[[], None] | None = None
    ) -> None:
        self._state, self._context, self._target = state, state.context, state.target
        self._number, self._trace, self._meanwhile = number, trace, meanwhile
        self._pacer = None if state.drafting is None else state.drafting.pacer
        self._clock = Clock(state.target.device, waits=state.target.ranks.is_split)
        self._clock.spans += state.begun
        state.begun = []
        self._prompts = PromptRunner(state, self._clock, sizes)

    def run(self) -> None:
        """Run the step; rows that fail on their own end with their errors."""
        clock, state = self._clock, self._state
        started = clock.timer()
        parts = self._prompts.chunks()
        chunks = [chunk for chunk in parts if chunk.block is not None]
        ended = [chunk for chunk in parts if chunk.block is None and chunk.prefill.done]
        proposed = self._propose(chunks)
        with clock.stage("verify" if len(state.prefills) < len(state.active) else "prefill"):
            self._forward(chunks, proposed)
            ended += [chunk for chunk in chunks if chunk.is_last and not chunk.has_tree]
            groups = [*proposed, *self._first_token_groups(ended)]
            decided = [group.decide(self._target.ranks) for group in groups]
        self._observe(proposed)
        transfer = to_host(decided, [[row.remaining for row in group.rows] for group in groups])
        drafting_ahead = self._begin_next(proposed)
        if self._meanwhile is not None:
            self._meanwhile()
        verdicts = transfer()  # the step's one synchronisation
        self._count_seconds(parts, groups)
        with_tree = {id(chunk.row): chunk for chunk in chunks if chunk.has_tree}
        emitted = sum([self._emit(group, each, with_tree) for group, each in zip(groups, verdicts, strict=True)])
        seconds = clock.timer() - started
        self._observe_costs(groups, parts, emitted, seconds)
        self._prompts.observe(seconds)
        state.begun = drafting_ahead

    # -- plan ----------------------------------------------------------------------------------------------

    def _propose(self, chunks: Sequence[PrefillChunk]) -> list[VerificationGroup]:
        """Trees of decoding rows and of rows whose prompts end in this step, greedy and sampling rows apart."""
        rows, beginning = self._state.decoding, [chunk.row for chunk in chunks if chunk.has_tree]
        if self._prompts.drafts is not None:
            self._prompts.drafts.run_early(beginning)
            self._prompts.join_late(rows)
        rows += beginning
        for row in rows:
            if row.request_drafts is not None and not row.done:
                try:
                    row.request_drafts.begin(row.ids, row.remaining)
                except Exception as error:
                    self._state.fail(row, error)
        groups = list[VerificationGroup]()
        for do_sample in (False, True):
            same = [row for row in rows if row.do_sample == do_sample and not row.done]
            if same:
                groups += self._groups(same, beginning, do_sample)
        return groups

    def _groups(self, rows: Sequence[Row], beginning: Sequence[Row], do_sample: bool) -> list[VerificationGroup]:
        """Groups of greedy or of sampling rows: each row with or without draft tokens of the drafter, as planned."""
        drafting, pacer, groups = self._state.drafting, self._pacer, list[VerificationGroup]()
        joined = rows if drafting is None else [row for row in rows if drafting[row].drafts]
        lengths = self._draft_lengths(joined, do_sample, len(rows) - len(joined))
        for row in beginning:  # whose first tree is drafted as the drafter's prompt was prefilled for it
            if id(row) in lengths:
                lengths[id(row)] = max(min(1, self._state.facts.max_depth), lengths[id(row)])
        is_measured = pacer is not None and not do_sample and pacer.measures
        for has_request_drafts in (False, True):
            drafted, plain = list[Row](), list[Row]()
            for row in rows:
                if (row.request_drafts is not None) == has_request_drafts:
                    suffices = row.request_drafts is not None and row.request_drafts.suffices
                    (drafted if lengths.get(id(row)) and not suffices else plain).append(row)
            if drafted and drafting is not None:
                planned = [lengths[id(row)] for row in drafted]
                groups += self._draft(drafting, drafted, do_sample, planned, len(rows) - len(drafted))
            if plain:
                group = self._root_group(plain, do_sample, has_request_drafts and not is_measured)
                groups += group.of_like_sizes()
        return groups

    def _draft_lengths(self, rows: Sequence[Row], do_sample: bool, others: int) -> dict[int, int]:
        """Most draft tokens of rows in this step, by id; 0 for none. ``others``: further rows without a drafter."""
        drafting, pacer = self._state.drafting, self._pacer
        if not rows:
            return {}
        if drafting is None or pacer is None:
            lengths = [self._state.facts.max_depth] * len(rows)
        elif do_sample:
            lengths = [sampled_length(trials) for trials in drafting.trials(rows)]
        else:
            lengths = pacer.lengths(drafting.trials(rows), others)
        return {id(row): length for row, length in zip(rows, self._agreed(lengths), strict=True)}

    def _agreed(self, lengths: list[int]) -> list[int]:
        """Rank 0's lengths: times differ from rank to rank."""
        return lengths if self._pacer is None else self._target.ranks.numbers(lengths)

    # -- draft ---------------------------------------------------------------------------------------------

    def _draft(
        self, drafting: Drafting, rows: list[Row], do_sample: bool, lengths: list[int], others: int
    ) -> list[VerificationGroup]:
        """Draft for some rows, as planned or as their pacer decides, and join the requests' drafts; groups by size."""
        facts, pacer = drafting.facts, self._pacer
        rule, judge = self._state.judge(do_sample)
        processing = Processing([row.processing for row in rows])
        uniforms, draws = self._uniforms(rows, rule)
        slots = [row.slot for row in rows if row.slot is not None]
        pairs = zip(slots, rows, strict=True)
        requests = {slot: row.request_drafts for slot, row in pairs if row.request_drafts is not None}
        guide = None
        if any(drafts.place is not None for drafts in requests.values()):
            guide = GrammarGuide(requests, self._context.rows, early=facts.is_early, splices=facts.splices)
        proposer: Proposer = TopProposer(guide)
        if draws:
            assert uniforms is not None
            proposer = DrawProposer(processing.warp, uniforms, guide)
        longest, paced = max(lengths), None
        # Elsewhere every level would wait for its confidences: all rows draft the longest planned length.
        if pacer is not None and not do_sample and self._target.device.type == "cpu":
            paced = pacer.begin(drafting.trials(rows), others, None if longest > 1 else 1)
            longest, add = pacer.max_length, paced.add
            proposer = PacedProposer(lambda confidences: bool(self._agreed([add(confidences)])[0]), guide)
        # Deeper nodes can never be emitted by any row; a row's depth is no less than when it is alone.
        remaining = max([row.remaining for row in rows])
        limit = min(remaining, longest) if rule.lossless else facts.max_depth
        new = []
        for row in rows:
            certain = row.request_drafts.run if row.request_drafts is not None and facts.is_early else ()
            new.append(drafting[row].pop_new_tokens(certain))
        with self._clock.stage("draft"), self._target.threads.on("draft", len(rows)):
            tree = drafting.session.propose(slots, new, proposer, limit)
            tree = self._target.ranks.tree(tree.to(self._target.device))
        levels, host = tree.size - 1, None
        if requests:
            kept = None if paced is None else self._agreed([min(length, levels) for length in paced.lengths])
            roots = [row.ids[-1] for row in rows]
            splices = guide is not None and guide.splices
            with self._clock.stage("draft"):
                tree, host = join([*requests.values()], tree, roots, kept, facts, spliced=splices)
        group = VerificationGroup(rows, tree, rule, judge, processing, uniforms, True, levels, host)
        if requests:
            return group.of_like_sizes()
        if pacer is None or paced is None or self._target.executor.fixed_shapes:
            return [group]
        by_length: dict[int, list[int]] = {}
        joined = pacer.joined([min(length, levels) for length in paced.lengths], len(self._target.layer_devices))
        for place, length in enumerate(self._agreed(joined)):
            by_length.setdefault(length, []).append(place)
        return [group.part(places, length + 1) for length, places in sorted(by_length.items())]

    def _root_group(self, rows: list[Row], do_sample: bool, has_request_drafts: bool = False) -> VerificationGroup:
        """A group with plain decoding's trees, of the last tokens alone, or with the requests' drafts below them."""
        rule, judge = self._state.judge(do_sample)
        roots = tuple(row.ids[-1] for row in rows)
        slots = [row.slot for row in rows if row.slot is not None]
        numbers = self._context.cache.numbers
        numbers.send([roots, *self._context.numbers_of(slots)])
        processing = Processing([row.processing for row in rows])
        uniforms, _ = self._uniforms(rows, rule)
        host = []
        if has_request_drafts:
            host = [row.request_drafts.grown(row.ids[-1]) for row in rows if row.request_drafts is not None]
        if host:
            tree = tree_on(host, self._target.device)
        else:
            tree = DraftTree.root_only(numbers.get(roots).to(self._target.device))
        return VerificationGroup(rows, tree, rule, judge, processing, uniforms, False, host=host or None)

    def _uniforms(self, rows: Sequence[Row], rule: Rule) -> tuple[Uniforms | None, bool]:
        """This step's random numbers, and whether children are drawn with them."""
        facts = self._state.facts
        depth, children, draws = facts.max_depth, facts.max_children, facts.draws and rule.samples
        if [row for row in rows if row.request_drafts is not None]:  # of all of them
            depth, children = depth + MOST, max(children, WIDEST)
        judging = rule.uniforms(depth, children)
        if not all(judging):
            return None, False
        drawing = facts.max_nodes * max(children, 1) if draws else 0
        return Uniforms([row.generator for row in rows], judging, drawing, self._target.device), draws

    # -- run the target ------------------------------------------------------------------------------------

    def _forward(self, chunks: Sequence[PrefillChunk], groups: Sequence[VerificationGroup]) -> None:
        """Run chunks of prompts and the groups' trees in one forward, and commit chunks that end without a tree."""
        blocks = self._blocks(chunks, groups)
        if not blocks:
            return
        tokens = sum([block.tokens.numel() for block, _ in blocks])
        with self._target.threads.on("forward", tokens):
            outputs = self._context.run([block for block, _ in blocks])
            for (_, owner), output in zip(blocks, outputs, strict=True):
                if isinstance(owner, PrefillChunk):
                    self._record(owner, output)
        self._assign_outputs(groups, blocks, outputs)

    def _blocks(
        self, chunks: Sequence[PrefillChunk], groups: Sequence[VerificationGroup]
    ) -> list[tuple[TokenBlock, Owner]]:
        """Blocks of the target's forward, each with its chunk or group."""
        blocks: list[tuple[TokenBlock, Owner]] = []
        for group in groups:
            slots = [row.slot for row in group.rows if row.slot is not None and row.slot not in self._state.prefills]
            if slots:
                blocks.append((tree_block(self._context, slots, group.tree), group))
        for chunk in chunks:
            if chunk.row.done:
                continue
            block = chunk.block
            assert block is not None
            if chunk.has_tree:
                group, index = _place_of(chunk.row, groups)
                block = append_tree(self._context, block, len(chunk.prefill.prompt), group.tree, index)
            blocks.append((block, chunk))
        return blocks

    def _record(self, chunk: PrefillChunk, output: ForwardOutput) -> None:
        """Commit a chunk that has run; with a tree after it, the verdict comes first."""
        assert chunk.block is not None
        slot = chunk.prefill.row
        chunk.prefill.record(output)
        if chunk.has_tree:
            _, judge = self._state.judge(chunk.row.do_sample)
            judge.load(slot, chunk.row.request.prompt, chunk.prefill.result)
        else:
            self._context.cache.commit([slot], [range(chunk.block.count)])

    def _assign_outputs(
        self,
        groups: Sequence[VerificationGroup],
        blocks: Sequence[tuple[TokenBlock, Owner]],
        outputs: Sequence[ForwardOutput],
    ) -> None:
        """Join the outputs of every group's trees."""
        joined = defaultdict[int, list[tuple[int, ForwardOutput, int]]](list)  # row, output, first token of the tree
        for (block, owner), output in zip(blocks, outputs, strict=True):
            if isinstance(owner, VerificationGroup):
                joined[id(owner)].append((-1, output, 0))
            elif owner.has_tree:
                group, index = _place_of(owner.row, groups)
                joined[id(group)].append((index, output, block.logits_from))
        for group in groups:
            _, parts, starts = zip(*sorted(joined[id(group)], key=itemgetter(0)), strict=True)
            group.output = concat_outputs(parts, starts)

    def _first_token_groups(self, ended: Sequence[PrefillChunk]) -> list[VerificationGroup]:
        """Groups for the first tokens of rows whose prompts ended without a tree after them."""
        groups = []
        for do_sample, has_request_drafts in product((False, True), repeat=2):
            rows, logits = [], []
            for chunk in ended:
                row, result = chunk.row, chunk.prefill.result
                if row.done or row.slot is None:
                    continue
                if (row.do_sample, row.request_drafts is not None) != (do_sample, has_request_drafts):
                    continue
                self._state.judge(do_sample)[1].load(row.slot, row.request.prompt, result)
                if self._prompts.drafts is not None:
                    self._prompts.drafts.run_after(row, result)
                if not row.done:
                    assert result.logits is not None
                    rows.append(row)
                    logits.append(result.logits)
            if rows:
                group = self._root_group(rows, do_sample)
                group.output = ForwardOutput(torch.stack(logits)[:, None])
                groups.append(group)
        return groups

    # -- the drafter learns the outcome --------------------------------------------------------------------

    def _observe(self, groups: Sequence[VerificationGroup]) -> None:
        drafting = self._state.drafting
        if drafting is None or not groups:
            return
        with self._clock.stage("draft"):
            for group in groups:
                assert group.scores is not None
                assert group.verdict is not None
                assert group.output is not None
                outcome = group.slots, group.tree, group.scores, group.verdict, group.output
                drafting.session.observe(*outcome, group.drafted)

    def _begin_next(self, groups: Sequence[VerificationGroup]) -> list[Span]:
        """Let the drafter begin the next drafts while the host waits for the verdicts; return their times."""
        drafting = self._state.drafting
        if drafting is None or not drafting.session.can_begin or self._target.ranks.is_split:
            return []
        drafted = [group for group in groups if group.drafted]
        if len(drafted) != 1:
            return []
        (group,) = drafted
        if group.host is not None or max([row.remaining for row in group.rows]) <= group.tree.max_depth + 1:
            return []
        assert group.verdict is not None
        clock = Clock(self._target.device)
        with clock.stage("draft"):
            drafting.session.begin_next(group.slots, group.tree, group.verdict)
        return clock.spans

    # -- emit ----------------------------------------------------------------------------------------------

    def _emit(
        self, group: VerificationGroup, verdicts: Sequence[RowVerdict], with_tree: dict[int, PrefillChunk]
    ) -> int:
        """Emit every row's tokens up to its end, commit their entries, and return the number of emitted tokens."""
        before = sum([len(row.output) for row in group.rows])
        paths: list[list[int]] = []
        commits: list[Commit] = []
        for index, (row, verdict) in enumerate(zip(group.rows, verdicts, strict=True)):
            try:
                if index in group.failed:
                    raise group.failed[index]
                tree = None if group.host is None else group.host[index]
                paths.append(self._emit_row(row, verdict, with_tree.get(id(row)), commits, tree))
            except Exception as error:
                self._state.fail(row, error)
                paths.append([])
        if commits:  # at once: entries that change slots are sent in one transfer
            slots, entries, ids = zip(*commits, strict=True)
            self._context.commit(slots, entries, ids)
        if self._trace and (group.drafted or group.host is not None):
            self._add_traces(group, paths)
        for row in group.rows:
            if row.done and row.slot is not None:
                if self._pacer is not None:
                    self._pacer.observe_end(len(row.output))
                self._state.leave(row, empty=False)
        for path, joint in zip(paths, group.host or (), strict=group.host is not None):
            group.request_emitted += max(0, len(path) - 1 - joint.accepted(path))
        return sum([len(row.output) for row in group.rows]) - before

    def _add_traces(self, group: VerificationGroup, paths: Sequence[Sequence[int]]) -> None:
        """Add every row's verified tree to its last step."""
        signals: dict[int, Mapping[str, tuple[float, ...]]] = {}
        if group.drafted and self._state.drafting is not None:
            signals = dict(zip(group.slots, self._state.drafting.session.signals(group.slots), strict=True))
        by_row = [{} if row.slot is None else signals.get(row.slot, {}) for row in group.rows]
        for row, tree in zip(group.rows, traces(group.tree, paths, by_row), strict=True):
            row.steps[-1] = replace(row.steps[-1], tree=tree)

    def _emit_row(
        self,
        row: Row,
        verdict: RowVerdict,
        chunk: PrefillChunk | None,
        commits: list[Commit],
        tree: HostTree | None = None,
    ) -> list[int]:
        """Emit a row's tokens and add their entries to ``commits``; return the nodes of emitted tokens, root first.

        ``tree``: where drafts of the request are in it.
        """
        assert row.slot is not None
        path, count, drafted = verdict.path, len(verdict.path) - 1, verdict.drafted
        if verdict.unsound:
            raise ModelError(
                f"The target's logits are not finite at step {self._number} (after {len(row.output)} new "
                "tokens); check the weights and the dtype (float16 overflows in some models, use bfloat16)."
            )
        first = row.slot in self._state.prefills
        row.stats.drafted_tokens += drafted
        row.stats.draft_passes += drafted > 0
        if not first:
            row.record_pass(min(count, row.remaining))
        accepted = min(count, drafted)
        if tree is not None:
            drafted, accepted = tree.drafted, tree.accepted(path)
        if self._pacer is not None and self._state.drafting is not None and drafted:
            self._pacer.observe_acceptance(self._state.drafting[row].trials, drafted, accepted)
        marks = [DRAFTED[code] for code in verdict.marks[1:]] if verdict.marks else [DRAFTED[STRICT]] * count
        emitted = row.emit([*verdict.tokens[1:], verdict.token], [*marks, "target"])
        if verdict.barred and len(emitted) > count:
            names = ", ".join(name_of(processor) for processor in row.plan.processors) or "none"
            raise InputError(
                f"The logits processors of the row ({names}) leave nothing to sample from after "
                f"{len(row.output) - 1} new tokens: every score is -inf, or one is inf or NaN; let them leave at least "
                "one token a finite score."
            )
        if first:
            row.stats.prefill_tokens = len(emitted)
        if tree is not None:
            kept = len(tree.predicted.intersection(path[1 : len(emitted) + 1]))
            row.stats.accepted_prediction_tokens += kept
            row.stats.rejected_prediction_tokens += len(tree.predicted) - kept
        row.steps.append(TicketChunk(tuple(emitted), tuple(row.marks[-len(emitted) :]), row.done))
        nodes = path[: len(emitted)]
        if chunk is not None:
            assert chunk.block is not None
            prompt = chunk.block.count
            entries = [*range(prompt), *(prompt - 1 + node for node in nodes[1:])]
            commits.append((row.slot, entries, verdict.tokens[1 : len(emitted)]))
        elif not first:
            commits.append((row.slot, nodes, verdict.tokens[: len(emitted)]))
        self._state.prefills.pop(row.slot, None)
        return path[: len(emitted) + 1]  # with a draft token that ended the row, which is not committed

    # -- times ---------------------------------------------------------------------------------------------

    def _count_seconds(self, prefilled: Sequence[PrefillChunk], groups: Sequence[VerificationGroup]) -> None:
        """Add the stages' times to the rows that took part in them; rows of one step share them."""
        seconds = self._clock.pop_seconds()
        forward, drafting = seconds.pop("verify", 0.0) + seconds.pop("prefill", 0.0), seconds.pop("draft", 0.0)
        counted = set[int]()
        for chunk in prefilled:
            if id(chunk.row) not in counted:  # a last chunk without a tree is also one of the joint forward's
                chunk.row.add_seconds({**seconds, "prefill": forward, "draft": drafting * chunk.has_tree})
                counted.add(id(chunk.row))
        for group in groups:
            for row in group.rows:
                if id(row) not in counted:
                    row.add_seconds({"verify": forward, "draft": drafting})

    def _observe_costs(
        self, groups: Sequence[VerificationGroup], chunks: Sequence[PrefillChunk], emitted: int, seconds: float
    ) -> None:
        """Let the pacer observe the time of a step with these chunks of prompts."""
        pacer, draft = self._pacer, self._clock.costs["draft"]
        if pacer is None or not groups:
            return
        rows = sum([len(group.rows) for group in groups])
        if chunks:
            spent = self._clock.costs["prefill"] + self._clock.costs["vision"]
            pacer.observe_prefill_step(spent, rows)
            return
        drafted = [group for group in groups if group.drafted]
        requested = [tree.requested for group in groups for tree in group.host or ()]
        pacer.observe_step(
            tokens=sum([len(group.rows) * group.tree.size for group in groups]),
            forward=max(seconds - draft, 0.0),
            rows=rows,
            emitted=emitted - sum([group.request_emitted for group in groups]),
            drafting=sum([len(group.rows) for group in drafted]),
            levels=max([group.levels for group in drafted], default=0),
            draft=draft,
            request_tokens=sum(requested),
        )


def _place_of(row: Row, groups: Sequence[VerificationGroup]) -> tuple[VerificationGroup, int]:
    """The group of a row, and its index there."""
    return next((group, index) for group in groups for index, other in enumerate(group.rows) if other is row)
