"""Grammars and predictions in the running batch: every drafter gives plain decoding's tokens, rows as if alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from sampling_kit import LIKELY, NEW, PROMPT, SMALL, exact, histogram, p_value, small_hybrid, small_model
from test_grammar import END, Brackets, schema, tokenizer
from test_request_trees import DEAD, GRAMMARS, LONG
from torch import Tensor

import harness
from assistants import assistant
from families import FAMILIES, perturbed
from heads_kit import random_head
from numerals import Numerals, TokenList
from saccade.draft.assistant import AssistantDrafter
from saccade.draft.drafter import Drafter, NullDrafter
from saccade.draft.ensemble.ensemble import EnsembleDrafter, Multimodal, Pruned, TextOnly
from saccade.draft.ensemble.weights import Fixed
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.lookup import PromptLookup
from saccade.draft.model import ModelDrafter
from saccade.draft.pard import PardDrafter
from saccade.draft.pruning import Pruning
from saccade.draft.trees.dynamic import DynamicTree
from saccade.draft.trees.oneshot import OneShotTree
from saccade.draft.trees.policy import Chain, ConfidentChain, StaticTree
from saccade.draft.trees.sage import SageTree
from saccade.engine import Engine, Request, Row, RunningBatch
from saccade.engine.costs import Pacer
from saccade.engine.row import plan
from saccade.grammar import Rollback
from saccade.inputs.families.family import Prompt
from saccade.loading import adapt
from saccade.target_model.adapter import Target
from saccade.verify.loose import FLy, LVSpec, RandomLoosening

TREES: dict[str, Any] = {**harness.TREES, "deep": OneShotTree(max_depth=7)}
EVEN = Pruning(keep_by="uniform", keep_images=0.5)


class Planned(Pacer):
    """A pacer of given lengths, which are asked for in turn."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(8, 0.1)
        self._planned = itertools.cycle(lengths)

    def lengths(self, rows: Any, others: int = 0) -> list[int]:
        return [next(self._planned) for _ in rows]

    def admits(self, others: int, prompt: int, remaining: float) -> bool:
        return next(self._planned) != 2


def by(kind: str, policy: str) -> Callable[[str], Any]:
    """A drafter of the kinds of all tests, except that heads' weights are all random."""
    if kind in HEAD_KINDS:
        return lambda name: HeadDrafter(random_head(name, kind), harness.target(name), TREES[policy])
    return lambda name: harness.DRAFTERS[kind](harness.target(name), harness.draft(name), TREES[policy])


def views(policy: str, *weighting: Any) -> Callable[[str], Drafter]:
    def build(name: str) -> Drafter:
        seen = [Pruned(EVEN), TextOnly(harness.draft(name).config, Numerals()), Multimodal()]
        return EnsembleDrafter(harness.draft(name), TREES[policy], seen, *weighting)

    return build


DRAFTERS: dict[str, Callable[[str], Drafter]] = {
    "grammar": lambda name: NullDrafter(),
    **{kind: by(kind, "dynamic") for kind in ("lookup", "suffix", "merged", *HEAD_KINDS)},
    **{policy: by("model", policy) for policy in harness.TREES},
    "views": views("chain"),
    "weighed views": views("dynamic", Fixed()),
    "views in a static tree": views("static"),
    "pruned": lambda name: EnsembleDrafter(harness.draft(name), TREES["static"], [Pruned(EVEN)]),
    "self": lambda name: EnsembleDrafter(harness.target(name), TREES["sage"], [Pruned(EVEN)]),
    "pard": by("pard", "chain"),
    "pard oneshot": lambda name: PardDrafter(harness.draft(name), OneShotTree(total=6, floor=0.0, max_depth=4), mask=7),
    **{f"{kind} chain": by(kind, "chain") for kind in HEAD_KINDS},
    "dflash oneshot": by("dflash", "deep"),
}
LOSSY = {"lvspec": LVSpec(), "fly": FLy(), "random": RandomLoosening()}


@cache
def engine(method: str, name: str = "llava") -> Engine:
    target = harness.target(name)
    if method == "plain":
        return Engine(target)
    if method in LOSSY:
        return Engine(target, DRAFTERS["chain"](name), LOSSY[method])
    return Engine(target, DRAFTERS[method](name))


# --------------------------------------------------------------------------- requests


@dataclass(frozen=True)
class Asked:
    prompt: Prompt
    options: dict[str, Any]
    seed: int = 0
    prediction: tuple[int, ...] = ()
    grammars: tuple[Callable[[], Rollback], ...] = ()

    def add(self, batch: RunningBatch) -> Row:
        more = {} if not self.grammars else {"logits_processor": [make() for make in self.grammars]}
        (decoding,) = plan(batch.target, [self.prompt], **self.options, **more)
        return batch.add(Request(self.prompt, seed=self.seed, prediction=self.prediction), decoding)


def alone(under: Engine, asked: Asked, rows: int = 1) -> Row:
    batch = under.open(rows)
    row = asked.add(batch)
    harness.drain(batch)
    return row


FORMS = {
    **GRAMMARS,
    "long": lambda: schema(LONG),
    "choice": lambda: schema({"enum": ["one", "two", "oneself"]}),
    "dead": lambda: schema(DEAD),
}


def words(text: str) -> list[int]:
    return [tokenizer().convert_tokens_to_ids(character) for character in text]


@cache
def requests(name: str = "llava", new: int = 44) -> tuple[Asked, ...]:
    """Of every kind, in an order in which neighbours differ."""
    case = FAMILIES[name]
    prompts = [p for kind in case.kinds for p in harness.prompts(case, case.inputs(kind, rows=3))]
    options: dict[str, Any] = {"max_new_tokens": new, "eos_token_id": END}
    made = list[Asked]()

    def ask(*names: str, prediction: tuple[int, ...] = (), **more: Any) -> Asked:
        prompt = prompts[len(made) % len(prompts)]
        made.append(Asked(prompt, options | more, len(made), prediction, grammars=tuple(FORMS[n] for n in names)))
        return made[-1]

    ask("form")
    ask()
    ask("long", max_new_tokens=33)
    said = alone(engine("plain", name), ask("spaced")).output
    ask("form", max_new_tokens=14)
    ask("spaced", prediction=(*said[:9], 33, *said[10:]))
    ask(prediction=tuple(words("nothing of the kind")))
    ask("choice")
    ask("form", repetition_penalty=1.4, sequence_bias=[[words("l"), -3.0]])
    ask("long", min_new_tokens=20)
    ask("array", prediction=tuple(words('["a","ab",12]')))
    ask("form", "form")
    ask("brackets", suppress_tokens=[20])
    ask("dead")
    ask("form", suppress_tokens=words("tf"))
    ask("choice", min_new_tokens=40)
    return tuple(made)


def together(under: Engine, asked: list[Asked], rng: random.Random, rows: int = 4, **more: Any) -> dict[int, Row]:
    """All of them in one batch, arriving between steps; some are cancelled."""
    batch, waiting, found = under.open(rows, **more), list(range(len(asked))), dict[int, Row]()
    rng.shuffle(waiting)
    while waiting or not batch.is_idle:
        if waiting and rng.random() < 0.6:
            number = waiting.pop()
            found[number] = asked[number].add(batch)
        batch.step()
        if rng.random() < 0.03 and found:
            row = rng.choice(list(found.values()))
            if not row.done:
                batch.cancel(row)
    return found


def assert_as_alone(found: dict[int, Row], expected: Callable[[int], Row]) -> None:
    for number, row in found.items():
        if row.finish().finish_reason == "cancelled":
            assert row.output == expected(number).output[: len(row.output)], number
            continue
        assert type(row.error) is type(expected(number).error), (number, row.error)
        assert row.output == expected(number).output, number


@cache
def plainly(name: str, number: int) -> Row:
    return alone(engine("plain", name), requests(name)[number])


# --------------------------------------------------------------------------- greedy decoding


@pytest.mark.parametrize("method", ["grammar", "chain"])
def test_the_trees_of_request_drafts_are_traced(method: str) -> None:
    for asked in (requests()[0], requests()[5]):
        batch = engine(method).open(1)
        batch.trace = True
        row = asked.add(batch)
        harness.drain(batch)
        guessed = 0
        for step in row.steps:
            drafted = [token for token, mark in zip(step.tokens, step.marks, strict=True) if mark == "draft"]
            assert not drafted or step.tree is not None
            if step.tree is not None:
                assert [step.tree.tokens[node] for node in step.tree.path[1:]] == drafted
            guessed += len(drafted)
        assert guessed == row.stats.accepted_tokens > 0


SLOW = [f"{kind} chain" for kind in HEAD_KINDS if kind not in ("eagle2", "medusa")]


@pytest.mark.parametrize("method", [pytest.param(m, marks=[pytest.mark.slow] * (m in SLOW)) for m in DRAFTERS])
def test_every_drafter_gives_the_tokens_of_plain_decoding_under_grammars_and_predictions(method: str) -> None:
    found = together(engine(method), list(requests()), random.Random(method))
    assert_as_alone(found, lambda number: plainly("llava", number))
    passes = sum(row.stats.target_passes for row in found.values())
    assert passes < 0.75 * sum(len(row.output) for row in found.values())


VARIOUS = ("mistral", "gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "lfm2", "nemotron_h", "idefics3")
"""Sliding windows, positions in three dimensions, features in deeper layers, recurrent layers, and more."""


@pytest.mark.singly
@pytest.mark.parametrize("method", ["grammar", "chain", "dynamic"])
@pytest.mark.parametrize("name", VARIOUS)
def test_targets_and_draft_models_of_every_kind_keep_to_plain_decoding(name: str, method: str) -> None:
    found = together(engine(method, name), list(requests(name)), random.Random(3), prefill_chunk=24)
    assert_as_alone(found, lambda number: plainly(name, number))


@pytest.mark.parametrize("lengths", [(0,), (2, 0, 0, 4), (4, 0), (1, 0, 3)])
@pytest.mark.parametrize("method", ["chain", "eagle2 chain"])
def test_steps_that_a_pacer_does_not_draft_for_change_nothing(method: str, lengths: tuple[int, ...]) -> None:
    under = Engine(harness.target("llava"), DRAFTERS[method]("llava"), pacer=Planned(*lengths))
    found = together(under, list(requests()), random.Random(5))
    assert_as_alone(found, lambda number: plainly("llava", number))


def test_an_assistant_keeps_to_plain_decoding() -> None:
    target = harness.target("gemma4")
    under = Engine(target, AssistantDrafter(assistant("gemma4"), target, TREES["dynamic"]))
    found = together(under, list(requests("gemma4")), random.Random(3))
    assert_as_alone(found, lambda number: plainly("gemma4", number))


@pytest.mark.parametrize("method", LOSSY)
def test_what_a_lossy_rule_lets_pass_is_legal(method: str) -> None:
    asked = requests()
    for number, row in together(engine(method), list(asked), random.Random(2), rows=3).items():
        if row.error is not None:
            assert len(asked[number].grammars) == 2 or plainly("llava", number).error is not None
            continue
        for make in asked[number].grammars[:1]:
            own = make()
            matcher = own.matcher()
            assert all(own.accept(matcher, token) for token in row.output if token != END), number


def test_a_dead_end_that_the_answer_does_not_reach_harms_no_row() -> None:
    for method in ("grammar", "lookup", "dynamic", "static"):
        row = alone(engine(method), requests()[13])
        assert row.error is None or plainly("llava", 13).error is not None
        assert row.output == plainly("llava", 13).output


class Unsound(Brackets):
    """Has no answer wherever three brackets are open."""

    def packed(self, matcher: list[list[int]]) -> bytes:
        if len(matcher[-1]) == 3:
            raise ZeroDivisionError
        return super().packed(matcher)


@pytest.mark.parametrize("method", ["plain", "grammar", "chain", "dynamic", "eagle2"])
def test_a_grammar_s_own_error_ends_its_row_where_plain_decoding_meets_it(method: str) -> None:
    batch, asked = engine(method).open(2), requests()
    bad = Asked(asked[1].prompt, {"max_new_tokens": 30, "eos_token_id": END}, grammars=(Unsound,))
    rows = [bad.add(batch), asked[0].add(batch)]
    harness.drain(batch)
    expected = alone(engine("plain"), bad)
    assert type(rows[0].error) is type(expected.error)
    assert rows[0].output == expected.output
    assert rows[1].output == plainly("llava", 0).output


@pytest.mark.parametrize("method", ["grammar", "chain", "eagle2", "lookup"])
def test_later_turns_of_a_conversation_keep_to_plain_decoding(method: str) -> None:
    asked, batches = requests(), [engine(each).open(2) for each in (method, "plain")]
    prompts = [asked[0].prompt, asked[0].prompt]
    for turn in range(3):
        answers = []
        for place, batch in enumerate(batches):
            row = Asked(prompts[place], {"max_new_tokens": 20 + turn}, grammars=asked[(0, 5, 2)[turn]].grammars).add(
                batch
            )
            harness.drain(batch)
            answers.append(row.output)
            prompts[place] = Prompt((*prompts[place].ids, *row.output, 30 + turn, 41), prompts[place].media)
        assert answers[0] == answers[1]


# --------------------------------------------------------------------------- sampling

DRAWN = ("chain", "static", "branches", "confident", "views", "views in a static tree", "pard", "eagle2 chain")
POINTS = ("grammar", "lookup", "suffix", "dynamic", "sage", "oneshot", "merged", "medusa", "dflash oneshot")


def sampled(name: str = "llava", new: int = 44) -> list[Asked]:
    settings = ({"temperature": 0.7}, {"top_p": 0.8, "temperature": 1.3}, {"top_k": 5}, {})
    made = []
    for number, (asked, more) in enumerate(zip(requests(name, new), itertools.cycle(settings), strict=False)):
        options = {"top_k": 0, **asked.options, **more, "do_sample": number % 5 != 4}
        made.append(Asked(asked.prompt, options, asked.seed, asked.prediction, grammars=asked.grammars))
    return made


@pytest.mark.parametrize("method", [*DRAWN, *POINTS])
def test_a_seed_repeats_its_answer_whatever_its_neighbours_ask_for(method: str) -> None:
    asked, under = sampled(), engine(method)
    found = together(under, asked, random.Random(method), rows=5)
    assert_as_alone(found, lambda number: alone(under, asked[number]))


@pytest.mark.parametrize("method", ["dynamic", "width", "oneshot"])
def test_what_is_forced_in_other_rows_takes_nothing_from_a_row(method: str) -> None:
    asked, under = [each for each in sampled(new=60) if len(each.grammars) == 1][:1] * 4, engine(method)
    prompts = [each.prompt for each in requests()[:4]]
    asked = [replace(each, prompt=prompts[seed], seed=seed) for seed, each in enumerate(asked)]
    batch = under.open(4)
    rows = [each.add(batch) for each in asked]
    harness.drain(batch)
    assert_as_alone(dict(enumerate(rows)), lambda number: alone(under, asked[number]))


class Limited(TokenList):
    """Of five tokens: after 1 comes 3, after 3 comes 0 or 2, and after 0 never 0; at first any."""

    ALLOWED = ([1, 2, 3, 4], [3], [0, 1, 2, 3, 4], [0, 2], [1, 2])

    def packed(self, matcher: list[int]) -> bytes:
        mask = np.zeros(SMALL, np.bool_)
        mask[self.ALLOWED[matcher[-1]] if matcher else range(SMALL)] = True
        return np.packbits(mask, bitorder="little").tobytes()


def limited(ids: Tensor, logits: Tensor) -> Tensor:
    scores = logits.clone() / 0.9
    for row, own in enumerate(ids.tolist()):
        allowed = Limited.ALLOWED[own[-1]] if len(own) > len(PROMPT) else range(SMALL)
        scores[row, [token for token in range(SMALL) if token not in allowed]] = float("-inf")
    return scores


SAMPLES = 700
SMALL_TREES: dict[str, Any] = {
    "chain": Chain(3),
    "static": StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]),
    "dynamic": DynamicTree(top=2, max_depth=3, total=6),
    "confident": ConfidentChain(3, 0.3),
    "sage": SageTree(),
}


def small_engine(kind: str) -> tuple[Any, Engine]:
    model = small_hybrid(1) if kind.startswith("hybrid") else small_model(1)
    target = Target(model)
    if kind == "grammar":
        return model, Engine(target, NullDrafter())
    if kind == "lookup":
        return model, Engine(target, PromptLookup(4))
    if kind == "narrow":
        return model, Engine(target, ModelDrafter(Target(small_model(2)), SMALL_TREES["static"], vocab_size=3))
    if kind == "pard":
        return model, Engine(target, PardDrafter(Target(small_model(2)), Chain(3), mask=2))
    draft = Target(small_hybrid(2) if kind.startswith("hybrid") else small_model(2))
    return model, Engine(target, ModelDrafter(draft, SMALL_TREES[kind.split()[-1]]))


@pytest.mark.singly
@pytest.mark.parametrize("predicted", [False, True])
@pytest.mark.parametrize("kind", ["grammar", "lookup", "pard", "narrow", "hybrid chain", *SMALL_TREES])
def test_answers_of_a_grammar_have_the_target_s_distribution(kind: str, predicted: bool) -> None:
    model, under = small_engine(kind)
    prompt, expected = Prompt(tuple(PROMPT)), (2, 2, 1, 3) if predicted else ()
    samples = SAMPLES // 3 if kind.startswith("hybrid") else SAMPLES
    asked = [Request(prompt, seed=seed, prediction=expected) for seed in range(samples)]
    options = {"do_sample": True, "max_new_tokens": NEW, "top_k": 0, "temperature": 0.9}
    outputs = under.generate(asked, logits_processor=[Limited()], **options)
    counts = histogram(torch.tensor([output.tokens for output in outputs]), SMALL)
    assert p_value(counts, exact(model, PROMPT, NEW, limited)) > LIKELY
    assert sum(output.stats.accepted_tokens for output in outputs) > samples / 4


# --------------------------------------------------------------------------- vocabularies and number formats


@pytest.mark.singly
@pytest.mark.parametrize("policy", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("shared", [40, 112, 150])
def test_a_draft_model_of_fewer_tokens_keeps_to_plain_decoding(policy: str, shared: int) -> None:
    """Also where it does not know a token that is forced."""
    under = Engine(harness.target("llava"), ModelDrafter(harness.draft("llava"), TREES[policy], vocab_size=shared))
    assert_as_alone(together(under, list(requests()), random.Random(1)), lambda number: plainly("llava", number))
    asked = sampled()
    assert_as_alone(together(under, asked, random.Random(1)), lambda number: alone(under, asked[number]))


@pytest.mark.formats
@pytest.mark.parametrize("method", ["chain", "static", "eagle2"])
def test_a_target_in_bfloat16_answers_legally(method: str) -> None:
    model = FAMILIES["llava"].model().to(torch.bfloat16)
    target = adapt(model)
    draft = adapt(perturbed(model, 0.1, 0), drafts=True)
    drafter: Drafter = ModelDrafter(draft, TREES.get(method, TREES["chain"]))
    if method == "eagle2":
        drafter = HeadDrafter(random_head("llava", "eagle2"), target, TREES["dynamic"])
    asked = requests()
    for number, row in together(Engine(target, drafter), list(asked), random.Random(4)).items():
        for make in asked[number].grammars[:1]:
            own = make()
            matcher = own.matcher()
            assert all(own.accept(matcher, token) for token in row.output if token != END)


# --------------------------------------------------------------------------- storms


def storm(method: str, name: str, count: int, seed: int) -> int:
    rng, under = random.Random(seed), engine(method, name)
    pool = [*requests(name), *(sampled(name) if under.lossless else ())]
    asked = []
    for number in range(count):
        chosen = rng.choice(pool)
        options = chosen.options | {"max_new_tokens": rng.randint(1, 70)}
        asked.append(Asked(chosen.prompt, options, number, chosen.prediction, grammars=chosen.grammars))
    rows, chunk = rng.randint(1, 6), rng.choice([9, 40, 512])
    found = together(under, asked, rng, rows=rows, prefill_chunk=chunk)
    reference = [engine("plain", name) if not each.options.get("do_sample") else under for each in asked]
    assert_as_alone(found, lambda number: alone(reference[number], asked[number], rows=rng.randint(1, 3)))
    return sum(len(row.output) for row in found.values())


@pytest.mark.parametrize(("method", "name"), [("static", "qwen2_5_vl"), ("chain", "qwen3_5"), ("views", "llava")])
def test_rows_with_forms_among_others_give_what_they_give_alone(method: str, name: str) -> None:
    assert storm(method, name, 10, 1) > 100


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", DRAFTERS)
def test_many_rows_with_forms_among_others_give_what_they_give_alone(method: str) -> None:
    for seed in range(10, 16):
        storm(method, "llava", 24, seed)
