"""One step of a batch, in this order (`StepRunner.run`).

1. Chunks of prompts are chosen. Rows that decode are grouped by the rule that judges them (`VerificationGroup`), with
   or without a drafter. The drafter proposes a draft tree per row, to which drafts of the rows' requests are joined.
2. The target runs all chunks and trees in one forward.
3. The rules judge the trees. The drafter observes the verdicts and may begin the next drafts, while the verdicts are
   transferred to the host: the step's one synchronisation.
4. Rows emit their tokens, the cache commits the accepted entries, and rows that have ended leave.
5. The rows and the pacer get the times.

State is in every `Row`, and in the `BatchState` with its caches. An error of one row ends that row alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, product
from math import isfinite
from operator import and_
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.draft.request_drafts import MOST, WIDEST, GrammarGuide, HostTree, RequestDrafts, alike, join, tree_on
from saccade.draft.trees.policy import DrawProposer, PacedProposer, Proposer, TopProposer
from saccade.engine.costs import Drafts, sampled_length
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

Commit = tuple[int, list[int], list[int]]
"""A row's slot, which of its pending entries are committed, and their tokens."""


class StepRunner:
    """One step of a running batch."""

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
        clock, state = self._clock, self._state
        started = clock.timer()
        parts = self._prompts.chunks()
        chunks = [chunk for chunk in parts if chunk.block is not None]  # the others have run
        ended = [chunk for chunk in parts if chunk.block is None and chunk.prefill.done]
        ended += [chunk for chunk in chunks if chunk.is_last and not chunk.has_tree]
        proposed = self._propose(chunks)
        with clock.stage("verify" if len(state.prefills) < len(state.active) else "prefill"):
            self._forward(chunks, proposed)
            groups = [*proposed, *self._first_token_groups(ended)]
            decided = [group.decide(self._target.ranks) for group in groups]
        self._observe(proposed)
        transfer = to_host(decided, [[row.remaining for row in group.rows] for group in groups])
        drafting_ahead = self._begin_next(proposed)
        if self._meanwhile is not None:
            self._meanwhile()
        verdicts = transfer()  # the step's one synchronisation
        self._count_seconds(parts, groups)
        with_tree = {chunk.row: chunk for chunk in chunks if chunk.has_tree}
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
        """Groups of greedy or of sampling rows, with or without drafts of the drafter, and of the rows' requests."""
        drafting, pacer, groups = self._state.drafting, self._pacer, list[VerificationGroup]()
        joined = rows if drafting is None else [row for row in rows if drafting[row].drafts]
        lengths = self._draft_lengths(joined, do_sample, len(rows) - len(joined))
        for row in beginning:  # a token at least: the drafter's prompt is prefilled for the row's first tree
            if row in lengths:
                lengths[row] = max(min(1, self._state.facts.max_depth), lengths[row])
        is_measured = pacer is not None and not do_sample and pacer.measures
        for has_request_drafts in (False, True):
            drafted, plain = list[Row](), list[Row]()
            for row in rows:
                if (row.request_drafts is not None) == has_request_drafts:
                    suffices = row.request_drafts is not None and row.request_drafts.suffices
                    (drafted if lengths.get(row) and not suffices else plain).append(row)
            if drafted and drafting is not None:
                planned = [lengths[row] for row in drafted]
                groups += self._draft(drafting, drafted, do_sample, planned, len(rows) - len(drafted))
            if plain:
                group = self._root_group(plain, do_sample, has_request_drafts and not is_measured)
                groups += group.of_like_sizes()
        return groups

    def _draft_lengths(self, rows: Sequence[Row], do_sample: bool, others: int) -> dict[Row, int]:
        """Most draft tokens of rows in this step; 0 for none. ``others``: further rows without a drafter."""
        drafting, pacer = self._state.drafting, self._pacer
        if not rows:
            return {}
        if drafting is None or pacer is None:
            lengths = [self._state.facts.max_depth] * len(rows)
        elif do_sample:
            lengths = [sampled_length(trials) for trials in drafting.trials(rows)]
        else:
            lengths = pacer.lengths(drafting.trials(rows), others)
        return dict(zip(rows, self._agreed(lengths), strict=True))

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
        uniforms = self._uniforms(rows, rule)
        longest, paced = max(lengths), None
        # On a CPU alone, since a device would wait at every level; there all rows draft the longest planned length.
        if pacer is not None and not do_sample and self._target.device.type == "cpu":
            paced = pacer.begin(drafting.trials(rows), others, None if longest > 1 else 1)
            longest = pacer.max_length
        requests = {row.slot: row.request_drafts for row in rows if row.slot is not None and row.request_drafts}
        proposer = self._proposer(rows, requests, paced, uniforms if rule.samples else None)
        # Deeper nodes can never be emitted by any row; a row's depth is no less than when it is alone.
        remaining = max([row.remaining for row in rows])
        limit = min(remaining, longest) if rule.lossless else facts.max_depth
        new = []
        for row in rows:
            certain = row.request_drafts.run if row.request_drafts is not None and facts.is_early else ()
            new.append(drafting[row].pop_new_tokens(certain))
        slots = [row.slot for row in rows if row.slot is not None]
        with self._clock.stage("draft"), self._target.threads.on("draft", len(rows)):
            tree = drafting.session.propose(slots, new, proposer, limit)
            tree = self._target.ranks.tree(tree.to(self._target.device))
        levels, host = tree.size - 1, None
        kept = None if paced is None else [min(length, levels) for length in paced.lengths]
        if requests:
            kept = kept and self._agreed(kept)
            splices = proposer.guide is not None and proposer.guide.splices
            with self._clock.stage("draft"):
                roots = [row.ids[-1] for row in rows]
                tree, host = join([*requests.values()], tree, roots, kept, facts, spliced=splices)
        group = VerificationGroup(rows, tree, rule, judge, uniforms, levels, host)
        if requests:
            return group.of_like_sizes()
        if pacer is None or kept is None or self._target.executor.fixed_shapes:
            return [group]
        return group.of_lengths(self._agreed(pacer.joined(kept, len(self._target.layer_devices))))

    def _proposer(
        self,
        rows: Sequence[Row],
        requests: Mapping[int, RequestDrafts],
        paced: Drafts | None,
        uniforms: Uniforms | None,
    ) -> Proposer:
        """What chooses the drafter's tokens: at most those that grammars allow; ``uniforms``: of rows that sample."""
        facts, guide = self._state.facts, None
        if any(drafts.place is not None for drafts in requests.values()):
            guide = GrammarGuide(requests, self._context.rows, early=facts.is_early, splices=facts.splices)
        if paced is not None:
            add = paced.add
            return PacedProposer(lambda confidences: bool(self._agreed([add(confidences)])[0]), guide)
        if facts.draws and uniforms is not None:
            warp = Processing([row.processing for row in rows]).warp
            return DrawProposer(warp, uniforms, guide)
        return TopProposer(guide)

    def _root_group(self, rows: list[Row], do_sample: bool, has_request_drafts: bool = False) -> VerificationGroup:
        """A group with plain decoding's trees, of the last tokens alone, or with the requests' drafts below them."""
        rule, judge = self._state.judge(do_sample)
        roots = tuple(row.ids[-1] for row in rows)
        slots = [row.slot for row in rows if row.slot is not None]
        numbers = self._context.cache.numbers
        numbers.send([roots, *self._context.numbers_of(slots)])
        uniforms = self._uniforms(rows, rule)
        host = None
        if has_request_drafts:
            host = [row.request_drafts.grown(row.ids[-1]) for row in rows if row.request_drafts is not None]
            tree = tree_on(host, self._target.device)
        else:
            tree = DraftTree.root_only(numbers.get(roots).to(self._target.device))
        return VerificationGroup(rows, tree, rule, judge, uniforms, host=host)

    def _uniforms(self, rows: Sequence[Row], rule: Rule) -> Uniforms | None:
        """This step's random numbers: for the judge, and for a drafter that draws children."""
        facts = self._state.facts
        depth, children = facts.max_depth, facts.max_children
        if rows[0].request_drafts is not None:  # then all of the rows have some
            depth, children = depth + MOST, max(children, WIDEST)
        judging = rule.uniforms(depth, children)
        if not all(judging):
            return None
        drawing = facts.max_nodes * max(children, 1) if facts.draws and rule.samples else 0
        return Uniforms([row.generator for row in rows], judging, drawing, self._target.device)

    # -- run the target, and let the drafter observe -------------------------------------------------------

    def _forward(self, chunks: Sequence[PrefillChunk], groups: Sequence[VerificationGroup]) -> None:
        """Run chunks of prompts and the groups' trees in one forward, and commit chunks without a tree after them."""
        context, blocks = self._context, list[TokenBlock]()
        decoding = list[VerificationGroup]()  # groups with decoding rows, which are their first
        for group in groups:
            slots = [row.slot for row in group.rows if row.slot is not None and row.slot not in self._state.prefills]
            if slots:
                decoding.append(group)
                blocks.append(group.block(context, slots))
        chunks = [chunk for chunk in chunks if not chunk.row.done]
        trees = dict[Row, VerificationGroup]()  # of chunks that have one
        for chunk in chunks:
            assert chunk.block is not None
            if chunk.has_tree:
                trees[chunk.row] = group = next(group for group in groups if chunk.row in group.rows)
                blocks.append(chunk.with_tree(context.target, group.tree, group.rows.index(chunk.row)))
            else:
                blocks.append(chunk.block)
        if not blocks:
            return
        tokens = sum([block.tokens.numel() for block in blocks])
        found = defaultdict[VerificationGroup, list[tuple[ForwardOutput, int]]](list)  # with where trees begin in each
        with self._target.threads.on("forward", tokens):
            outputs = context.run(blocks)
            for group, output in zip(decoding, outputs, strict=False):  # chunks follow
                found[group].append((output, 0))
            at = len(decoding)
            for chunk, block, output in zip(chunks, blocks[at:], outputs[at:], strict=True):
                self._record(chunk, output)
                if chunk.has_tree:
                    found[trees[chunk.row]].append((output, block.logits_from))
        for group, of_group in found.items():
            group.output = concat_outputs(*zip(*of_group, strict=True))

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
                drafting.session.observe(*outcome, group.is_drafted)

    def _begin_next(self, groups: Sequence[VerificationGroup]) -> list[Span]:
        """Let the drafter begin the next drafts while the host waits for the verdicts; return their times."""
        drafting = self._state.drafting
        if drafting is None or not drafting.session.can_begin or self._target.ranks.is_split:
            return []
        drafted = [group for group in groups if group.is_drafted]
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
        self, group: VerificationGroup, verdicts: Sequence[RowVerdict], with_tree: Mapping[Row, PrefillChunk]
    ) -> int:
        """Emit every row's tokens and commit them; return how many, without accepted drafts of the requests."""
        paths: list[list[int]] = []
        commits: list[Commit] = []
        emitted = 0
        for index, (row, verdict) in enumerate(zip(group.rows, verdicts, strict=True)):
            tree, before = None if group.host is None else group.host[index], len(row.output)
            try:
                if index in group.failed:
                    raise group.failed[index]
                path = self._emit_row(row, verdict, tree, with_tree.get(row), commits)
            except Exception as error:
                self._state.fail(row, error)
                path = []
            paths.append(path)
            emitted += len(row.output) - before
            if tree is not None:
                emitted -= max(0, len(path) - 1 - tree.accepted(path))
        if commits:  # at once: entries that change slots are sent in one transfer
            slots, entries, ids = zip(*commits, strict=True)
            self._context.commit(slots, entries, ids)
        if self._trace and (group.is_drafted or group.host is not None):
            self._add_traces(group, paths)
        for row in group.rows:
            if row.done and row.slot is not None:
                if self._pacer is not None:
                    self._pacer.observe_end(len(row.output))
                self._state.leave(row, empty=False)
        return emitted

    def _emit_row(
        self,
        row: Row,
        verdict: RowVerdict,
        tree: HostTree | None,
        chunk: PrefillChunk | None,
        commits: list[Commit],
    ) -> list[int]:
        """Emit a row's tokens and add their entries to ``commits``; return the nodes of emitted tokens, root first.

        ``tree``: where drafts of the request are in it; ``chunk``: the prompt's end, where the tree ran after it.
        """
        assert row.slot is not None
        if verdict.unsound:
            raise ModelError(
                f"The target's logits are not finite at step {self._number} (after {len(row.output)} new "
                "tokens); check the weights and the dtype (float16 overflows in some models, use bfloat16)."
            )
        path, count = verdict.path, len(verdict.path) - 1
        is_first = self._state.prefills.pop(row.slot, None) is not None
        self._count_drafts(row, verdict, tree, is_first)
        marks = [DRAFTED[code] for code in verdict.marks[1:]] if verdict.marks else [DRAFTED[STRICT]] * count
        emitted = row.emit([*verdict.tokens[1:], verdict.token], [*marks, "target"])
        if verdict.barred and len(emitted) > count:
            names = ", ".join(name_of(processor) for processor in row.plan.processors) or "none"
            raise InputError(
                f"The logits processors of the row ({names}) leave nothing to sample from after "
                f"{len(row.output) - 1} new tokens: every score is -inf, or one is inf or NaN; let them leave at least "
                "one token a finite score."
            )
        if is_first:
            row.stats.prefill_tokens = len(emitted)
        if tree is not None:
            kept = len(tree.predicted.intersection(path[1 : len(emitted) + 1]))
            row.stats.accepted_prediction_tokens += kept
            row.stats.rejected_prediction_tokens += len(tree.predicted) - kept
        row.steps.append(TicketChunk(tuple(emitted), tuple(row.marks[-len(emitted) :]), row.done))
        nodes = path[: len(emitted)]
        if chunk is not None:
            commits.append((row.slot, chunk.entries(nodes), verdict.tokens[1 : len(emitted)]))
        elif not is_first:
            commits.append((row.slot, nodes, verdict.tokens[: len(emitted)]))
        return path[: len(emitted) + 1]  # with a draft token that ended the row, which is not committed

    def _count_drafts(self, row: Row, verdict: RowVerdict, tree: HostTree | None, is_first: bool) -> None:
        """Count a row's draft tokens and its pass, and let the pacer observe what became of the drafter's."""
        count, drafted = len(verdict.path) - 1, verdict.drafted
        row.stats.drafted_tokens += drafted
        row.stats.draft_passes += drafted > 0
        if not is_first:
            row.record_pass(min(count, row.remaining))
        accepted = min(count, drafted)
        if tree is not None:
            drafted, accepted = tree.drafted, tree.accepted(verdict.path)
        if self._pacer is not None and self._state.drafting is not None and drafted:
            self._pacer.observe_acceptance(self._state.drafting[row].trials, drafted, accepted)

    def _add_traces(self, group: VerificationGroup, paths: Sequence[Sequence[int]]) -> None:
        """Add every row's verified tree to its last step, without padding nodes, which are last."""
        signals: dict[int | None, Mapping[str, tuple[float, ...]]] = {}
        if group.is_drafted and self._state.drafting is not None:
            signals = dict(zip(group.slots, self._state.drafting.session.signals(group.slots), strict=True))
        tree, count = group.tree, len(group.rows)
        sizes = tree.valid.expand(count, -1).sum(1).tolist()
        nodes = zip(tree.tokens.tolist(), tree.parents.expand(count, -1).tolist(), sizes, strict=True)
        for row, path, (tokens, parents, size) in zip(group.rows, paths, nodes, strict=True):
            if path:
                trace = TreeTrace(tuple(tokens[:size]), tuple(parents[:size]), tuple(path), signals.get(row.slot, {}))
                row.steps[-1] = replace(row.steps[-1], tree=trace)

    # -- times ---------------------------------------------------------------------------------------------

    def _count_seconds(self, prefilled: Sequence[PrefillChunk], groups: Sequence[VerificationGroup]) -> None:
        """Add the stages' times to the rows that took part in them; rows of one step share them."""
        seconds = self._clock.pop_seconds()
        forward, drafting = seconds.pop("verify", 0.0) + seconds.pop("prefill", 0.0), seconds.pop("draft", 0.0)
        for chunk in prefilled:
            chunk.row.add_seconds({**seconds, "prefill": forward, "draft": drafting * chunk.has_tree})
        counted = {chunk.row for chunk in prefilled}
        for group in groups:
            for row in group.rows:
                if row not in counted:
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
            pacer.observe_prefill_step(self._clock.costs["prefill"] + self._clock.costs["vision"], rows)
            return
        drafted = [group for group in groups if group.is_drafted]
        pacer.observe_step(
            tokens=sum([len(group.rows) * group.tree.size for group in groups]),
            forward=max(seconds - draft, 0.0),
            rows=rows,
            emitted=emitted,
            drafting=sum([len(group.rows) for group in drafted]),
            levels=max([group.levels or 0 for group in drafted], default=0),
            draft=draft,
            request_tokens=sum([tree.requested for group in groups for tree in group.host or ()]),
        )


@dataclass(eq=False, slots=True)
class VerificationGroup:
    """Rows that one rule judges together, with their trees and the target's outputs."""

    rows: list[Row]  # decoding rows first, then those whose prompts end in this step
    tree: DraftTree  # one tree per row
    rule: Rule
    judge: Judge
    uniforms: Uniforms | None
    levels: int | None = None  # that the drafter ran, maybe more than the trees have; None where it was left out
    host: Sequence[HostTree] | None = None  # the trees, where drafts of the requests are in them
    output: ForwardOutput | None = None  # logits `[A, N, V]` and hidden states `[A, N, d]` of the trees' nodes
    scores: Tensor | None = None
    verdict: Verdict | None = None
    failed: dict[int, Exception] = field(default_factory=dict)  # errors of logits processors by index of the row
    processing: Processing = field(init=False)  # of the rows

    def __post_init__(self) -> None:
        self.processing = Processing([row.processing for row in self.rows])

    @property
    def slots(self) -> list[int]:
        """Cache slots of the rows."""
        return [slot for row in self.rows if (slot := row.slot) is not None]

    @property
    def is_drafted(self) -> bool:
        """Whether a drafter proposed the trees, and observes the outcome."""
        return self.levels is not None

    def of_lengths(self, lengths: Sequence[int]) -> list[VerificationGroup]:
        """Groups of rows whose chains are cut to one length; the rows are not sampled."""
        places = defaultdict[int, list[int]](list)
        for place, length in enumerate(lengths):
            places[length].append(place)
        return [self._of(same, self.tree.cut(same, length + 1), None) for length, same in sorted(places.items())]

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
        return replace(self, rows=[self.rows[place] for place in places], tree=tree, host=host, failed={})

    def block(self, context: Context, slots: Sequence[int]) -> TokenBlock:
        """Block of the trees of the first rows, which have these slots."""
        ours = self.tree.rows(0, len(slots))
        return context.block(slots, ours.tokens, None if ours.size == 1 else ours.ancestors, ours.depth)

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


def pack(tree: DraftTree, verdict: Verdict, logits: Tensor, sampled: Tensor | None) -> Tensor:
    """Pack verdicts into ``[A, 4 + 4 * (D + 1)]`` integers for one transfer.

    Per row: accepted count, token, whether logits are not finite, whether the token was sampled from scores without a
    finite maximum, path nodes, path tokens, number of nodes down to each depth without padding, path marks.
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
