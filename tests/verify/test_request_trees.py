"""Drafts of a request, on the host: masks and forced runs of grammars, joined trees, and what models run of them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from test_grammar import END, NOTHING, SCHEMA, Brackets, compiled_by_xgrammar, schema, tokenizer

import harness
from families import FAMILIES, VOCAB
from numerals import TokenList
from saccade.draft.drafter import DrafterFacts
from saccade.draft.model import ModelDrafter
from saccade.draft.prediction import Prediction
from saccade.draft.request_drafts import MOST, WIDEST, HostTree, RequestDrafts, alike, join
from saccade.draft.trees.policy import Chain, StaticTree
from saccade.engine import Engine, Request
from saccade.engine.row import plan
from saccade.errors import InputError
from saccade.grammar import Rollback, XGrammar, lark
from saccade.tree import DraftTree
from saccade.verify.rule import RowProcessing, Verdict

DEAD = {
    **NOTHING,
    "properties": {**NOTHING["properties"], "xy": {"enum": ["a", "b"]}},  # type: ignore[dict-item]
    "required": ["xy"],
}
"""JSON in which `"x"` is allowed, and nothing after it."""
FORM = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["bar", "barrel", "line"]},
        "title": {"type": "string", "maxLength": 5},
        "show": {"type": "boolean"},
        "n": {"type": "integer"},
        "unit": {"const": "per cent of all"},
    },
    "required": ["kind", "title", "show", "n", "unit"],
    "additionalProperties": False,
}
LONG = {
    "type": "object",
    "properties": {"note": {"const": "a text that is longer than what any tree holds of it at once, " * 3}},
    "required": ["note"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, Any] = {
    "brackets": Brackets,
    "form": lambda: schema(FORM),
    "spaced": lambda: schema(SCHEMA, whitespace=True),
    "array": lambda: schema({"type": "array", "items": {"enum": ["a", "ab", 12, None]}, "maxItems": 4}),
    "lark": lambda: lark('start: "ab" ("12" | "ab")+ /[x-z]{2,3}/', tokenizer(), VOCAB),
    "xgrammar": lambda: XGrammar(compiled_by_xgrammar()),
}


class Ends(TokenList):
    """Three tokens and an end, none of which is special."""

    def accept(self, matcher: list[int], token: int) -> bool:
        return len(matcher) <= 3 and super().accept(matcher, token)

    def packed(self, matcher: list[int]) -> bytes:
        if len(matcher) > 3:
            raise InputError("Nothing may follow the end.")
        mask = np.zeros(VOCAB, np.bool_)
        mask[[20, 21] if len(matcher) < 3 else [30]] = True
        return np.packbits(mask, bitorder="little").tobytes()


def mask_of(own: Rollback, tokens: list[int]) -> list[int]:
    """Tokens that a matcher of its own allows after others."""
    matcher = own.matcher()
    assert all(own.accept(matcher, token) for token in tokens)
    return np.flatnonzero(np.unpackbits(np.frombuffer(own.packed(matcher), np.uint8), bitorder="little")).tolist()


# --------------------------------------------------------------------------- masks and forced runs


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_and_forced_runs_are_those_of_a_matcher_of_its_own_wherever_the_walk_goes(name: str) -> None:
    own, rng = GRAMMARS[name](), random.Random(7)
    root = own.start([1, 2])
    places, forced = [(root, list[int]())], 0
    for number in range(160):
        place, path = rng.choice(places[-12:] if number % 3 else places)
        allowed = mask_of(own, path)
        if rng.random() < 0.5:  # the mask first, or the run
            assert np.flatnonzero(np.unpackbits(place.packed, bitorder="little")).tolist() == allowed
        if place.run:
            forced += 1
            assert [place.run[0]] == allowed
            assert mask_of(own, [*path, *place.run[:-1]]) == [place.run[-1]]
        else:
            assert len(allowed) > 1
        assert place.count == len(allowed)
        tried = [rng.randrange(VOCAB) for _ in range(20)] + allowed[:5]
        assert [place.allows(token) for token in tried] == [token in allowed for token in tried]
        token = rng.choice(allowed)
        if token == END:
            continue
        below = place.ahead(token)
        assert below is not None
        assert below is place.after(token)
        places.append((below, [*path, token]))
        if number % 40 == 39:  # as between steps: what is in front of a place is forgotten
            place, path = rng.choice(places)
            own.settle(place)
            places = [(each, p) for each, p in places if p[: len(path)] == path]
    assert forced or name in ("brackets", "xgrammar")


def test_a_dead_end_is_not_drafted_and_leaves_the_walk_as_it_was() -> None:
    own = schema(DEAD)
    words = tokenizer().convert_tokens_to_ids(list('{"x"'))
    place = own.start([])
    for token in words:
        if token != words[-1]:
            own.settle(place)
        place = place.after(token)
    own.settle(place.parent)
    dead = tokenizer().convert_tokens_to_ids(":")
    assert place.allows(dead)
    for _ in range(2):
        assert place.ahead(dead) is None
        with pytest.raises(InputError, match="no text here"):
            place.after(dead).run  # noqa: B018
    assert place.parent.ahead(tokenizer().convert_tokens_to_ids("y")) is not None


# --------------------------------------------------------------------------- trees on the host


def drafts_of(
    grammar: Rollback | None, emitted: list[int], remaining: int, ends: set[int], **more: Any
) -> RequestDrafts:
    prompt = [5, 6, 7]
    own = RequestDrafts(RowProcessing([] if grammar is None else [grammar], ends), more.get("prediction"), len(prompt))
    own.begin(prompt, remaining + len(emitted))
    own.begin([*prompt, *emitted], remaining)
    return own


def paths_of(tree: HostTree) -> list[list[int]]:
    paths: list[list[int]] = [[]]
    for token, parent in tree.nodes[1:]:
        paths.append([*paths[parent], token])
    return paths


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("seed", range(3))
def test_every_node_of_a_request_s_tree_is_allowed_and_none_is_too_deep(name: str, seed: int) -> None:
    own, rng = GRAMMARS[name](), random.Random(seed)
    emitted, more = list[int](), {}
    for step in range(8):
        remaining = rng.choice([1, 2, 5, 40])
        if seed == 2:
            expected = [rng.choice(mask_of(own, emitted)) for _ in range(6)]
            more = {"prediction": Prediction([*emitted, *expected], VOCAB, (END,))}
        drafts = drafts_of(own, emitted, remaining, {END}, **more)
        assert len(drafts.run) <= min(remaining, MOST)
        tree = drafts.grown(9)
        for path in paths_of(tree):
            assert len(path) <= remaining
            assert END not in path[:-1]
            assert not path or path[-1] in mask_of(own, [*emitted, *path[:-1]])
        assert paths_of(tree).count(drafts.run) == 1
        assert max(Counter(parent for _, parent in tree.nodes[1:]).values(), default=0) <= WIDEST
        for _ in range(rng.randint(1, 6)):
            token = rng.choice(mask_of(own, emitted))
            if token == END:
                return
            emitted.append(token)
        assert step < 8


def test_a_grammar_s_end_that_does_not_end_the_row_is_drafted_but_nothing_behind_it() -> None:
    """The row goes on there, and plain decoding fails in the step after it, if there is one."""
    drafts = drafts_of(Ends(), [20, 21, 20], 1, set())
    assert drafts.run == [30]
    assert paths_of(drafts.grown(20)) == [[], [30]] or paths_of(drafts.grown(20)) == [[]]
    with pytest.raises(InputError, match="Nothing may follow"):
        drafts_of(Ends(), [20, 21, 20, 30], 1, set())


def proposed(rng: random.Random, size: int, allowed: list[int], q: bool) -> DraftTree:
    parents = [0, *(rng.randrange(node) for node in range(1, size))]
    left = [rng.sample(allowed, len(allowed)) for _ in range(size)]  # no two children of a node are alike
    order, tokens = torch.arange(size)[None], torch.tensor([[9, *(left[parent].pop() for parent in parents[1:])]])
    valid = torch.ones(1, size, dtype=torch.bool)
    tree = DraftTree.of_nodes(tokens, torch.tensor([parents]), order, valid, size, size)
    tree.q = torch.rand(1, size, VOCAB) if q else None
    return tree


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("spliced", [False, True])
@pytest.mark.parametrize("name", ["form", "long", "brackets"])
def test_a_joined_tree_keeps_within_its_bounds_and_says_which_nodes_are_the_drafter_s(
    name: str, spliced: bool, drawn: bool
) -> None:
    own, rng = schema(LONG) if name == "long" else GRAMMARS[name](), random.Random(1)
    words = sorted({END, *range(20, 32), *tokenizer().convert_tokens_to_ids(list('{"kindbarline":,}'))})
    for size in (1, 2, 9, 60):
        for remaining in (1, 4, 200):
            drafts, tree = drafts_of(own, [], remaining, {END}), proposed(rng, size, words, drawn)
            depth = int(tree.depth.max())
            whole, (host,) = join([drafts], tree, [9], None, DrafterFacts(size, depth), spliced=spliced)
            assert whole.size <= size + MOST + 1
            assert whole.max_depth == int(whole.depth.max()) <= min(depth + MOST, remaining)
            children = Counter(parent for _, parent in host.nodes[1:])
            assert max(children.values(), default=0) <= whole.max_children <= WIDEST
            assert whole.sources is not None
            for node, source in enumerate(whole.sources[0].tolist()):
                if source > 0:
                    assert whole.tokens[0, node] == tree.tokens[0, source]
            if not drawn:
                for path in paths_of(host):
                    assert not path or path[-1] in mask_of(own, path[:-1])
            if whole.q is not None:
                assert tree.q is not None
                for (token, parent), source in list(zip(host.nodes, host.sources, strict=True))[1:]:
                    expected = tree.q[0, int(tree.parents[0, source]), token] if source > 0 else 1.0
                    assert whole.q[0, parent, token] == expected


def test_what_is_forced_behind_a_drafter_s_nodes_is_no_deeper_than_the_random_numbers_of_a_step() -> None:
    own = schema(LONG)
    forced = own.start([]).run
    tokens = torch.tensor([[9, *forced[MOST : MOST + 3]]])
    tree = DraftTree.chains(tokens, torch.ones(1, 4, dtype=torch.bool))
    bounds = DrafterFacts(60, 6)
    whole, (host,) = join([drafts_of(own, [], 200, {END})], tree, [9], None, bounds, spliced=True)
    assert whole.max_depth == MOST + 6
    assert max(paths_of(host), key=len) == list(forced[: MOST + 6])


def test_nothing_is_drafted_behind_an_end() -> None:
    tree = HostTree(9, None, {END}, 10, 10)
    assert tree.add(tree.add(0, END), 20) is None
    assert tree.add(tree.add(0, 20), 20) == 3


def test_the_verdict_on_a_joined_tree_is_told_to_the_drafter_of_its_own_nodes_alone() -> None:
    for rng in map(random.Random, range(50)):
        size = rng.randint(1, 12)
        sources, own = list[int](), 0
        for _ in range(size):  # a chain in which forced tokens are between the drafter's
            is_own = rng.random() < 0.5
            sources.append(own if is_own else -1)
            own += is_own
        count = rng.randrange(size)
        tree = DraftTree.chains(torch.arange(size)[None], torch.ones(1, size, dtype=torch.bool))
        tree.sources = torch.tensor([sources])
        verdict = Verdict(torch.arange(size)[None], torch.tensor([count]), torch.tensor([3])).on_proposed(tree)
        reached = [source for source in sources[: count + 1] if source >= 0]
        assert verdict.count.item() == max(len(reached) - 1, 0)
        assert verdict.path[0, : len(reached)].tolist() == reached
        assert not verdict.path[0, len(reached) :].any()


# --------------------------------------------------------------------------- what a draft model runs


FAMILIES_OF_ALL_KINDS = ("llama", "mistral", "gemma3", "qwen2_5_vl", "qwen3_5", "lfm2", "nemotron_h")
"""Full and sliding windows, positions in three dimensions, and recurrent layers of three kinds."""
TREES = {"chain": Chain(4), "static": StaticTree([(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (0, 1), (0, 0, 0, 0)])}


@pytest.mark.parametrize("policy", TREES)
@pytest.mark.parametrize("name", FAMILIES_OF_ALL_KINDS)
def test_a_draft_model_that_is_the_target_is_never_wrong_between_forced_tokens(name: str, policy: str) -> None:
    """Wrong depths, masks or states of what it runs would show as rejected tokens."""
    case, model = FAMILIES[name], harness.target(name)
    prompts = harness.prompts(case, case.inputs(case.kinds[0], rows=3))
    batch = Engine(model, ModelDrafter(model, TREES[policy])).open(3)
    rows = []
    for number, prompt in enumerate(prompts):
        forms = [schema(FORM), schema(LONG), GRAMMARS["lark"]()]
        options = {"eos_token_id": END, "max_new_tokens": 70, "logits_processor": [forms[number]]}
        (decoding,) = plan(model, [prompt], **options)
        rows.append(batch.add(Request(prompt), decoding))
    harness.drain(batch)
    for row in rows:
        assert row.error is None
        stats = row.stats
        if policy == "chain":
            assert stats.drafted_tokens == stats.accepted_tokens > 0.7 * len(row.output)
        full = stats.accepted_histogram[4:]
        assert sum(full) >= stats.target_passes - 1, "all but the last pass hold four tokens at least"


def test_trees_of_one_group_differ_by_few_nodes() -> None:
    assert alike([3, 40, 5, 9, 44, 10]) == [[0, 2, 3], [5], [1, 4]]
    assert alike([7]) == [[0]]
