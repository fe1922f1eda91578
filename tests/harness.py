"""Engines over the tiny families, built once per process, drafters of every kind, and how outputs are compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from families import EOS, FAMILIES, MAX_NEW_TOKENS, FamilyCase, Inputs, pristine, reference_greedy
from numerals import Numerals
from saccade.draft.drafter import Drafter
from saccade.draft.ensemble.ensemble import EnsembleDrafter, Multimodal, Pruned, TextOnly
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.lookup import PromptLookup
from saccade.draft.merged import MergedDrafter
from saccade.draft.model import ModelDrafter
from saccade.draft.pard import PardDrafter
from saccade.draft.pruning import Pruning
from saccade.draft.suffix import SuffixDrafter
from saccade.draft.trees.dynamic import DynamicTree, WidthTree
from saccade.draft.trees.oneshot import OneShotTree
from saccade.draft.trees.policy import Chain, ConfidentChain, StaticTree, branches_of
from saccade.draft.trees.sage import SageTree
from saccade.engine import Engine, Request, RunningBatch
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt
from saccade.loading import adapt
from saccade.options import SuffixOptions
from saccade.output import Output
from saccade.target_model.adapter import Target
from saccade.tree import DraftTree

POLICIES: dict[str, Any] = {
    "chain": Chain(4),
    "static": StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)]),
    "dynamic": DynamicTree(top=3, max_depth=4, total=12),
}
TREES: dict[str, Any] = {
    **POLICIES,
    "branches": branches_of(3, 3),
    "confident": ConfidentChain(5, 0.5),
    "width": WidthTree(2, 4),
    "sage": SageTree(),
    "oneshot": OneShotTree(12, 0.02, 4),
}
METHODS = ("plain", *POLICIES)
OPTIONS: dict[str, Any] = {
    "repetition_penalty": lambda a: {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": lambda a: {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size_2": lambda a: {"no_repeat_ngram_size": 2, "repetition_penalty": 0.8},
    "encoder_repetition_penalty": lambda a: {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": lambda a: {"encoder_no_repeat_ngram_size": 1},
    "bad_words": lambda a: {"bad_words_ids": [[a[3]], [a[5], a[6]]]},
    "suppress_tokens": lambda a: {"suppress_tokens": [a[2], a[7]]},
    "begin_suppress_tokens": lambda a: {"begin_suppress_tokens": [a[0]]},
    "sequence_bias": lambda a: {"sequence_bias": [[[a[4]], 3.0], [[a[8], a[9]], -5.0]]},
    "eos": lambda a: {"eos_token_id": a[10]},
    "several_eos": lambda a: {"eos_token_id": [a[20], a[12], EOS]},
    "min_new_tokens": lambda a: {"eos_token_id": a[6], "min_new_tokens": 15},
    "min_length": lambda a: {"eos_token_id": a[6], "min_length": 20},
    "forced_eos_token_id": lambda a: {"eos_token_id": EOS, "forced_eos_token_id": EOS},
    "exponential_decay": lambda a: {"eos_token_id": a[22], "exponential_decay_length_penalty": (4, 1.5)},
    "remove_invalid_values": lambda a: {"remove_invalid_values": True, "renormalize_logits": True},
    "sampling_settings_without_sampling": lambda a: {"temperature": 0.3, "top_p": 0.4, "top_k": 3},
}
"""Options of `generate` by the tokens of the answer without them."""


@cache
def target(name: str) -> Target:
    """The family's target under test, as it is loaded (the reference has a copy of its own)."""
    return adapt(FAMILIES[name].model())


@cache
def draft(name: str) -> Target:
    return adapt(FAMILIES[name].draft_model(), drafts=True)


@cache
def engine(name: str, method: str) -> Engine:
    """``method``: plain, lookup, or the name of a tree policy for the family's draft model."""
    return build(target(name), draft(name), method)


def build(model: Target, draft_model: Target, method: str) -> Engine:
    if method == "plain":
        return Engine(model)
    if method == "lookup":
        return Engine(model, PromptLookup())
    return Engine(model, ModelDrafter(draft_model, POLICIES[method]))


def headed(kind: str, model: Target, _: Target, policy: Any, **options: Any) -> HeadDrafter:
    """A head with random weights, as a new one begins."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        head = build_head(HeadConfig.from_target(model, kind, **options))
        head.begin_from(model)
    return HeadDrafter(head.to(model.dtype), model, policy, in_training=True)


def ensemble(model: Target, draft_model: Target, policy: Any, *weighting: Any) -> EnsembleDrafter:
    """Two views: everything, and the text alone."""
    return EnsembleDrafter(draft_model, policy, [Multimodal(), TextOnly(draft_model.config, Numerals())], *weighting)


_HALF = Pruned(Pruning(keep_images=0.5))
DRAFTERS: dict[str, Callable[[Target, Target, Any], Drafter | None]] = {
    "plain": lambda model, draft_model, policy: None,
    "model": lambda model, draft_model, policy: ModelDrafter(draft_model, policy),
    "ensemble": ensemble,
    "pruned": lambda model, draft_model, policy: EnsembleDrafter(draft_model, policy, [_HALF]),
    "self": lambda model, draft_model, policy: EnsembleDrafter(model, policy, [_HALF]),
    "lookup": lambda model, draft_model, policy: PromptLookup(),
    "suffix": lambda model, draft_model, policy: SuffixDrafter(SuffixOptions()),
    "merged": lambda model, draft_model, policy: MergedDrafter(ModelDrafter(draft_model, policy), PromptLookup(6)),
    "pard": lambda model, draft_model, policy: PardDrafter(draft_model, policy, mask=7),
    **{kind: partial(headed, kind) for kind in HEAD_KINDS},
}
"""A drafter of every kind for a target, by means of a draft model and a tree where it has them."""


def prompts(case: FamilyCase, inputs: Inputs) -> list[Prompt]:
    """The rows of a Hugging Face batch for the family's models."""
    return split(target(case.name).config, inputs)


def prompt(name: str, kind: str | None = None, row: int = 0) -> Prompt:
    """One row of a family's prompts of one kind, by default its first."""
    case = FAMILIES[name]
    return prompts(case, case.row_inputs(kind or case.kinds[0], row))[0]


def prompts_of(name: str, kind: str | None = None, rows: int = 3) -> list[Prompt]:
    """Rows of a family's prompts of one kind, by default its first."""
    case = FAMILIES[name]
    return prompts(case, case.inputs(kind or case.kinds[0], rows))


def requests(name: str, kind: str | None = None, rows: int = 3, seed: int = 0) -> list[Request]:
    """The same as requests."""
    return [Request(each, seed=seed + row) for row, each in enumerate(prompts_of(name, kind, rows))]


def run(name: str, method: str, inputs: Inputs, n: int = MAX_NEW_TOKENS, **options: Any) -> list[Output]:
    """The engine's outputs for all rows of a Hugging Face batch."""
    return answers(engine(name, method), prompts(FAMILIES[name], inputs), n, **options)


def answers(method: Engine, asked: Sequence[Prompt], n: int = MAX_NEW_TOKENS, **options: Any) -> list[Output]:
    """The engine's outputs for some prompts."""
    return method.generate([Request(each) for each in asked], max_new_tokens=n, **options)


def answer(method: Engine, asked: Prompt, n: int = MAX_NEW_TOKENS, **options: Any) -> Output:
    """The engine's output for one prompt."""
    return answers(method, [asked], n, **options)[0]


def assert_equals_generate(
    method: Engine, name: str, kind: str | None = None, rows: int = 3, n: int = MAX_NEW_TOKENS
) -> list[Output]:
    """Compare an engine's greedy answers with those of `generate`; return its outputs."""
    kind = kind or FAMILIES[name].kinds[0]
    outputs: list[Output] = method.generate(requests(name, kind, rows), max_new_tokens=n)
    assert tokens(outputs) == FAMILIES[name].reference(kind, rows, n=n)
    return outputs


FIRST, SECOND = 18, 24
"""Tokens of the answers of two turns."""


def second_turn(name: str, kind: str, row: int = 0) -> Inputs:
    """First question, its answer, and a question with new media."""
    case = FAMILIES[name]
    return case.continued(kind, row, case.reference(kind, rows=row + 1, n=FIRST)[row])


def assert_one_shot(session: RunningBatch, name: str, inputs: Inputs, n: int = SECOND) -> Output:
    """A session's answer equals that of `generate` to the whole history."""
    (longer,) = prompts(FAMILIES[name], inputs)
    output = answer(session.engine, longer, n, session=session)
    assert output.tokens == reference_greedy(pristine(name), inputs, n)[0]
    return output


@contextmanager
def running_on(threads: int) -> Iterator[None]:
    """Run torch on so many threads while the context is open."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


Proposal = tuple[int, list[int], DraftTree]
"""A row, what its drafter has been shown of its answer, and the tree that was drafted after it."""


def proposals(method: Engine, asked: Sequence[Request], n: int) -> tuple[list[Output], list[Proposal]]:
    """Answers, and all trees that led to them."""
    session = method.open(len(asked))
    propose, shown, found = session.drafting.propose, defaultdict[int, list[int]](list), list[Proposal]()

    def recorded(rows: Sequence[int], new: Sequence[Sequence[int]], *others: Any) -> DraftTree:
        tree: DraftTree = propose(rows, new, *others)
        for place, row in enumerate(rows):
            shown[row] += new[place]
            found.append((row, [*shown[row]], tree.rows(place, place + 1)))
        return tree

    session.drafting.propose = recorded
    return method.generate(asked, max_new_tokens=n, session=session), found


def drain(batch: RunningBatch) -> None:
    """Run a batch to the end of all its rows."""
    while not batch.is_idle:
        batch.step()


def tokens(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.tokens for output in outputs]


def assert_partly_accepted(outputs: Sequence[Output]) -> None:
    """Without accepted and rejected drafts, equality would say nothing about the tree path."""
    for output in outputs:
        stats = output.stats
        assert 0 < stats.accepted_tokens < stats.drafted_tokens
        assert stats.target_passes < len(output.tokens) - 1


def course(output: Output) -> tuple[Any, ...]:
    """The answer's tokens, and which of them were drafted in which pass."""
    return output.tokens, output.marks, output.stats.accepted_histogram, output.stats.drafted_tokens
