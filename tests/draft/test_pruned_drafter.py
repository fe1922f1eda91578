"""A pruned drafter's context holds what was kept, and without pruning it drafts as the unpruned one does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from families import FAMILIES
from saccade.draft.drafter import DraftSession
from saccade.draft.model import ModelDrafter
from saccade.draft.pruning import PrunedDrafter, Pruning
from saccade.draft.trees.policy import Chain, TopProposer
from saccade.draft.trees.sage import SageTree
from saccade.engine import Engine, Request
from saccade.errors import ModelError
from saccade.inputs.families import split, visual_mask
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.cache import QUANTUM
from saccade.target_model.context import Context
from saccade.tree import DraftTree

NAMES = ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3"]
NEW = [[20], [31, 42], [53, 64, 75], [86]]


@cache
def target(name: str) -> Target:
    return Target(FAMILIES[name].model())


@cache
def draft(name: str) -> Target:
    return Target(FAMILIES[name].draft_model())


def prompt(name: str, kind: str = "image", row: int = 0) -> Prompt:
    return split(target(name).config, FAMILIES[name].row_inputs(kind, row))[0]


def loaded(drafter: ModelDrafter, name: str, given: Prompt, room: int = 40) -> tuple[Any, Context]:
    """A session whose row 0 holds a prompt, and the target's context; ``last`` of it is what it has read."""
    context: Any = Context(target(name), 1)
    session = drafter.open(1, context)
    session.reserve(0, len(given) + room)
    context.last = context.load(0, given)
    session.load(0, given, context.last)
    return session, context


def noted_starts(session: Any) -> list[int]:
    """How many ids its row held already, of every prompt that a draft session loads from now on."""
    starts: list[int] = []
    load = session.context.load

    def noted(*given: Any) -> Any:
        read = load(*given)
        starts.append(read.start)
        return read

    session.context.load = noted
    return starts


def proposals(session: DraftSession) -> list[DraftTree]:
    return [session.propose([0], [new], TopProposer(), 12) for new in NEW]


@pytest.mark.parametrize("select", ["uniform", "attention", "specvlm"])
@pytest.mark.parametrize("name", NAMES)
def test_without_pruning_it_proposes_what_the_unpruned_drafter_proposes(name: str, select: Any) -> None:
    everything = Pruning(select, keep_images=1.0, keep_videos=1.0)
    for policy in (Chain(3), SageTree()):
        ours, _ = loaded(PrunedDrafter(draft(name), policy, pruning=everything), name, prompt(name))
        theirs, _ = loaded(ModelDrafter(draft(name), policy), name, prompt(name))
        for one, other in zip(proposals(ours), proposals(theirs), strict=True):
            assert torch.equal(one.tokens, other.tokens)
            assert torch.equal(one.parents.expand_as(one.tokens), other.parents.expand_as(one.tokens))


@pytest.mark.parametrize("select", ["uniform", "attention", "specvlm"])
@pytest.mark.parametrize("name", NAMES)
def test_the_drafter_reads_text_and_kept_tokens_only(name: str, select: Any) -> None:
    given = prompt(name)
    session, _ = loaded(PrunedDrafter(draft(name), Chain(3), pruning=Pruning(select, keep_images=0.25)), name, given)
    visual = int(visual_mask(target(name).config, given.ids).sum())
    kept = max(1, int(0.25 * visual + 0.5))
    assert session.context.lengths == [len(given) - visual + kept]
    room = session.context.cache.capacity(0)
    assert 0 <= room - (len(given) + 40 - (visual - kept) + session._slack) < QUANTUM
    proposals(session)
    assert session.context.cache.capacity(0) == room


def test_the_target_s_attention_is_read_only_where_it_is_needed() -> None:
    for select, expected in (("uniform", False), ("attention", True), ("specvlm", True)):
        pruning = Pruning(select, keep_images=0.5)  # type: ignore[arg-type]
        _, context = loaded(PrunedDrafter(draft("llava"), Chain(2), pruning=pruning), "llava", prompt("llava"))
        assert (context.requirements.attention is not None) == expected
    _, context = loaded(
        PrunedDrafter(draft("llava"), Chain(2), pruning=Pruning(layers=(-1,))), "llava", prompt("llava")
    )
    assert (context.requirements.attention, context.requirements.queries) == ((-1,), "words")


def test_two_readers_of_the_same_attention_must_agree_on_its_layers() -> None:
    context = Context(target("llava"), 1)
    drafters = [PrunedDrafter(draft("llava"), Chain(2), pruning=Pruning(layers=n)) for n in (None, None, (-1,))]
    for drafter in drafters[:2]:
        drafter.open(1, context)
    with pytest.raises(ModelError, match="choose the same for all"):
        drafters[2].open(1, context)


def test_it_keeps_what_the_target_looks_at() -> None:
    name, given = "qwen2_5_vl", prompt("qwen2_5_vl")
    pruning = Pruning("attention", keep_images=0.5)
    session, context = loaded(PrunedDrafter(draft(name), Chain(2), pruning=pruning), name, given)
    columns = context.last.columns  # type: ignore[attr-defined]
    assert columns is not None
    places = visual_mask(target(name).config, given.ids).nonzero()[:, 0]
    best = places[columns[places].topk(len(places) // 2).indices].tolist()
    dropped = session.context.dropped(0)
    assert sorted([*best, *dropped]) == places.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_second_turn_keeps_the_gaps_of_the_first(name: str) -> None:
    case, first = FAMILIES[name], prompt(name)
    (longer,) = split(target(name).config, case.continued("image", 0, NEW[2]))
    session, context = loaded(
        PrunedDrafter(draft(name), Chain(2), pruning=Pruning(keep_images=0.5)), name, first, room=80
    )
    gaps = session.context.dropped(0)
    session.propose([0], [NEW[2]], TopProposer(), 2)
    read = context.load(0, longer)
    assert session.context.shared_prefixes([0], longer)[0] == len(first) + len(NEW[2])
    session.load(0, longer, read)
    assert session.context.dropped(0)[: len(gaps)] == gaps
    assert session.context.lengths == [len(longer) - len(session.context.dropped(0))]
    assert len(session.context.dropped(0)) > len(gaps)


def test_another_question_about_the_same_picture_is_pruned_by_its_own_words() -> None:
    """What an earlier prompt's words had dropped would else stay dropped in what both have in common."""
    name, first = "qwen2_5_vl", prompt("qwen2_5_vl")
    other = Prompt((*first.ids[:-2], 91, 47, 60), first.media)
    drafter = PrunedDrafter(draft(name), Chain(2), pruning=Pruning("attention", keep_images=0.25))
    used, context = loaded(drafter, name, first)
    fresh, _ = loaded(drafter, name, other)
    before = list(used.context.dropped(0))
    context.forget(0)
    used.load(0, other, context.load(0, other))
    assert used.context.dropped(0) == fresh.context.dropped(0)
    assert before != fresh.context.dropped(0), "the two questions look at the same: the test shows nothing"
    for one, two in zip(proposals(used), proposals(fresh), strict=True):
        assert torch.equal(one.tokens, two.tokens)


def test_a_prompt_without_images_is_read_whole() -> None:
    given = prompt("llava", "text")
    session, _ = loaded(PrunedDrafter(draft("llava"), Chain(2)), "llava", given)
    assert session.context.lengths == [len(given)]


def test_self_speculation_shares_the_weights() -> None:
    own = target("qwen3_vl")
    drafter = PrunedDrafter(own, Chain(3), pruning=Pruning(keep_images=0.25))
    session, context = loaded(drafter, "qwen3_vl", prompt("qwen3_vl"))
    assert session.context.target is context.target is own
    assert session.context.lengths[0] < context.lengths[0]


@pytest.mark.parametrize("name", NAMES)
def test_self_speculation_looks_once_at_an_image_of_a_later_turn(name: str) -> None:
    """The drafter goes on a few words before the target, which holds what was accepted last already."""
    case, pruning = FAMILIES[name], Pruning(keep_images=0.5)
    own, other = Target(case.model()), Target(case.model())
    base = own.model.base_model
    tower = base.visual if hasattr(base, "visual") else base.vision_tower
    looks: list[int] = []
    tower.register_forward_hook(lambda *_: looks.append(1))
    courses = []
    for model in (own, other):  # the other one has the same weights, but looks for itself
        engine, course = Engine(own, PrunedDrafter(model, Chain(3), pruning=pruning)), []
        for count in (6, 7, 8, 9):
            session: Any = engine.open(1)
            starts = noted_starts(session.drafting)
            inputs = case.row_inputs("image", 0)
            for turn in range(2):
                looks.clear()
                (asked,) = split(own.config, inputs)
                (output,) = engine.generate([Request(asked)], max_new_tokens=count, session=session)
                assert len(looks) == 1
                reused = output.stats.reused_tokens, starts[-1]
                course.append((output.tokens, output.stats.accepted_histogram, turn, reused))
                inputs = case.continued("image", 0, output.tokens)
        courses.append(course)
    assert courses[0] == courses[1]
    assert any(turn and target_held > held for *_, turn, (target_held, held) in courses[0])
