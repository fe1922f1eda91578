"""Selections of visual tokens against NumPy, scores on other grids, and drafters that read only what is kept."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from families import FAMILIES, IMAGE, VISUAL_FAMILIES
from harness import draft, prompt, target
from saccade.draft.drafter import Drafter, DraftSession
from saccade.draft.ensemble.ensemble import EnsembleDrafter, Pruned
from saccade.draft.pruning import Pruning, frames_of, places_of, resample, spread, two_stages
from saccade.draft.trees.policy import Chain, TopProposer, TreePolicy
from saccade.engine import Engine, Request
from saccade.errors import ModelError, SaccadeWarning
from saccade.inputs.families import family_of, split
from saccade.inputs.families.family import Medium, Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.cache import QUANTUM
from saccade.target_model.context import Context
from saccade.tree import DraftTree

sys.path.insert(0, str(Path(__file__).parents[1] / "inputs"))
from kits import VIDEO, kit

SCORES = st.lists(st.integers(0, 1000), min_size=1, max_size=40)
"""Whole numbers: their sums are exact, so that a threshold is met or not."""


def numpy_two_stages(scores: np.ndarray[Any, Any], budget: int, mass: float) -> list[int]:
    order = np.argsort(-scores, kind="stable")
    shares = np.cumsum(scores[order])
    enough = np.concatenate([[0], shares]) >= mass * scores.sum()
    first = order[: min(int(np.argmax(enough)), budget)]
    others = np.setdiff1d(np.arange(len(scores)), first)
    rest = budget - len(first)
    steps = (2 * np.arange(rest) + 1) * len(others) // max(2 * rest, 1)
    return sorted(np.concatenate([first, others[steps]]).astype(int).tolist())


@pytest.mark.parametrize("name", VIDEO)
def test_a_video_s_share_stays_of_its_frames_too(name: str) -> None:
    processor = kit(name).ours
    film = np.random.default_rng(0).integers(0, 256, (8, 100, 100, 3), np.uint8)
    images = [Image.fromarray(film[0])]
    prompt = processor.prompt("What?", images=images, videos=[film])
    left = {}
    for images_share, videos_share in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5)):
        pruning = Pruning(keep_by="uniform", keep_images=images_share, keep_videos=videos_share)
        dropped = set(pruning.dropped(family_of(processor.config), prompt))
        left[images_share, videos_share] = [
            sum(place not in dropped for place in places) for places in places_of(family_of(processor.config), prompt)
        ]
    whole = left[1.0, 1.0]
    for medium, here, image_cut, video_cut in zip(prompt.media, whole, left[0.5, 1.0], left[1.0, 0.5], strict=True):
        cut, kept = (video_cut, image_cut) if medium.is_of_video else (image_cut, video_cut)
        assert cut == (here + 1) // 2 < here == kept
    assert {medium.is_of_video for medium in prompt.media} == {True, False}


@given(SCORES, st.one_of(st.floats(0, 0.99), st.just(1.0)), st.data())
def test_two_stages_are_those_of_numpy(scores: list[int], mass: float, data: st.DataObject) -> None:
    budget = data.draw(st.integers(1, len(scores)))
    kept = two_stages(scores, budget, mass)
    if mass == 1:
        assert kept == sorted(np.argsort(-np.array(scores), kind="stable")[:budget].tolist())
    else:
        assert kept == numpy_two_stages(np.array(scores), budget, mass)
    assert len(set(kept)) == budget


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_an_even_spread_gives_every_frame_its_part(frames: list[int], data: st.DataObject) -> None:
    size = min(frames)
    frames = [size] * len(frames)
    budget = data.draw(st.integers(1, sum(frames)))
    kept = spread(frames, budget)
    assert kept == sorted(set(kept))
    assert len(kept) == budget
    parts = np.bincount([k // size for k in kept], minlength=len(frames))
    assert parts.max() - parts.min() <= 1
    for frame, part in enumerate(parts):
        steps = np.diff([k % size for k in kept if k // size == frame])
        assert part < 2 or steps.max() - steps.min() <= 1


def test_every_fifth_token_stays_of_an_image_and_every_tenth_of_a_video() -> None:
    assert spread([25], 5) == [2, 7, 12, 17, 22]
    assert spread([20, 20], 4) == [5, 15, 25, 35]
    assert spread([4, 4, 4], 2) == [6, 10]


# --------------------------------------------------------------------------- families


@pytest.mark.parametrize(
    ("name", "kind"), [(n, k) for n in VISUAL_FAMILIES for k in ("image", "images2", "video") if k in FAMILIES[n].kinds]
)
def test_every_medium_keeps_its_share_and_all_text_stays(name: str, kind: str) -> None:
    family, whole = target(name).family, prompt(name, kind)
    columns = torch.rand(len(whole), generator=torch.Generator().manual_seed(0))
    for select in ("uniform", "attention", "specvlm"):
        pruning = Pruning(keep_by=select, keep_images=0.5, keep_videos=0.25)  # type: ignore[arg-type]
        dropped = set(pruning.dropped(family, whole, whole, columns, family))
        for places, medium in zip(places_of(family, whole), whole.media, strict=True):
            assert sum(frames_of(family, medium)) == medium.n_tokens == len(places)
            share = 0.25 if medium.kind == "video" else 0.5
            assert len(set(places) - dropped) == max(1, int(share * medium.n_tokens + 0.5))
            if select == "attention":
                worst = min(columns[p] for p in places if p not in dropped)
                assert all(columns[p] <= worst for p in places if p in dropped)
        assert dropped <= {p for places in places_of(family, whole) for p in places}


def test_grids_are_those_of_the_families() -> None:
    grids = {}
    for name in VISUAL_FAMILIES:
        kind = FAMILIES[name].kinds[-2]  # a video where there is one, else two images
        grids[name] = family_of(target(name).config).grid(prompt(name, kind).media[0])
    assert grids["llava"] == grids["gemma3"] == (1, 4, 4)
    assert grids["llava_pixtral"] == grids["mistral3"] == (1, 2, 3)
    assert grids["llava_next"] is None
    assert grids["llava_onevision"] == (3, 2, 2)
    assert grids["qwen2_vl"] == grids["qwen2_5_vl"] == grids["qwen3_vl"] == (2, 2, 3)
    assert grids["idefics3"] == grids["smolvlm"] == grids["internvl"] == (1, 2, 2)


def test_scores_are_read_at_the_same_relative_place_of_another_grid() -> None:
    scores = torch.arange(16.0)
    assert resample(scores, (1, 4, 4), (1, 2, 2)).tolist() == [5, 7, 13, 15]
    finer = resample(torch.tensor([1.0, 2, 3, 4]), (1, 2, 2), (1, 4, 4))
    assert finer.view(4, 4)[0].tolist() == [1, 1, 2, 2]
    assert resample(scores, (1, 4, 4), (1, 4, 4)).tolist() == scores.tolist()
    assert resample(torch.tensor([1.0, 2.0]), (2, 1, 1), (4, 1, 1)).tolist() == [1, 1, 2, 2]


def image(count: int, frames: int = 1) -> Medium:
    return Medium("image", {"pixel_values": torch.zeros(frames, 3, 16, 16)}, count, f"{count}x{frames}")


def prompt_of(*media: Medium) -> Prompt:
    return Prompt((1, *(i for m in media for i in ([IMAGE] * m.n_tokens + [9]))), media)


def test_a_drafter_with_coarser_eyes_keeps_what_the_target_saw() -> None:
    family = target("llava").family
    columns = torch.zeros(18)
    columns[1 + 5 : 1 + 7] = torch.tensor([1.0, 2.0])  # both middle tokens of the second row
    pruning = Pruning(keep_by="attention", keep_images=0.5)
    dropped = pruning.dropped(family, prompt_of(image(4)), prompt_of(image(16)), columns, family)
    assert dropped == [3, 4]


@pytest.mark.parametrize("other", [prompt_of(image(4), image(4)), prompt_of(image(15))], ids=["count", "grid"])
def test_attention_that_fits_nothing_is_noted_and_pruning_is_even(other: Prompt) -> None:
    family = target("llava").family
    pruning, mine = Pruning(keep_by="specvlm", keep_images=0.5), prompt_of(image(4))
    columns = torch.rand(len(other))
    with pytest.warns(SaccadeWarning, match="pruned evenly instead"):
        dropped = pruning.dropped(family, mine, other, columns, family)
    assert dropped == Pruning(keep_by="uniform", keep_images=0.5).dropped(family, mine)


def test_a_prompt_of_words_loses_nothing_whatever_was_read_last() -> None:
    """View R reads a batch's rows of words again once an image row has come, after that row's attention."""
    family, other = target("llava").family, prompt_of(image(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Pruning(0.2).dropped(family, Prompt((1, 2, 3)), other, torch.rand(len(other)), family) == []


def test_media_of_unknown_families_stay_whole() -> None:
    family = family_of(SimpleNamespace(model_type="newest", vision_config=SimpleNamespace(), image_token_id=IMAGE))
    unknown = Prompt((1, 5, 6), (Medium("image", {}, 0, "x"),))
    assert Pruning(0.2, keep_by="uniform").dropped(family, unknown) == []


# --------------------------------------------------------------------------- pruned drafters

NAMES = ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3"]
NEW = [[20], [31, 42], [53, 64, 75], [86]]


def pruned(model: Target, policy: TreePolicy, pruning: Pruning) -> EnsembleDrafter:
    return EnsembleDrafter(model, policy, [Pruned(pruning)])


def loaded(drafter: Drafter, name: str, whole: Prompt, room: int = 40) -> tuple[Any, Context]:
    """A session whose row 0 holds a prompt, and the target's context; ``last`` of it is what it has read."""
    context: Any = Context(target(name), 1)
    session = drafter.open(1, context)
    session.begin(0, len(whole) + room)
    context.last = context.load(0, whole)
    session.load(0, whole, context.last)
    return session, context


def noted_starts(session: Any) -> list[int]:
    """How many ids its row held already, of every prompt that a draft session loads from now on."""
    starts: list[int] = []
    load = session.context.load

    def noted(*arguments: Any) -> Any:
        read = load(*arguments)
        starts.append(read.start)
        return read

    session.context.load = noted
    return starts


def proposals(session: DraftSession) -> list[DraftTree]:
    return [session.propose([0], [new], TopProposer(), 12) for new in NEW]


@pytest.mark.parametrize("select", ["uniform", "attention", "specvlm"])
@pytest.mark.parametrize("name", NAMES)
def test_the_drafter_reads_text_and_kept_tokens_only(name: str, select: Any) -> None:
    whole = prompt(name)
    drafter = pruned(draft(name), Chain(3), Pruning(keep_by=select, keep_images=0.25))
    words, _ = loaded(drafter, name, prompt(name, "text"))
    assert words.context.lengths == [len(prompt(name, "text"))]
    session, _ = loaded(drafter, name, whole)
    visual = int(family_of(target(name).config).visual_mask(whole.ids).sum())
    kept = max(1, int(0.25 * visual + 0.5))
    assert session.context.lengths == [len(whole) - visual + kept]
    room = session.context.cache.capacity(0)
    assert 0 <= room - (len(whole) + 40 - (visual - kept) + session._session._slack) < QUANTUM
    proposals(session)
    assert session.context.cache.capacity(0) == room


def test_the_target_s_attention_is_read_only_where_it_is_needed() -> None:
    for select, expected in (("uniform", False), ("attention", True), ("specvlm", True)):
        pruning = Pruning(keep_by=select, keep_images=0.5)  # type: ignore[arg-type]
        _, context = loaded(pruned(draft("llava"), Chain(2), pruning), "llava", prompt("llava"))
        assert (context.requirements.attention is not None) == expected
    _, context = loaded(pruned(draft("llava"), Chain(2), Pruning(0.5, layers=(-1,))), "llava", prompt("llava"))
    assert (context.requirements.attention, context.requirements.queries) == ((-1,), "words")


def test_two_readers_of_the_same_attention_must_agree_on_its_layers() -> None:
    context = Context(target("llava"), 1)
    drafters = [pruned(draft("llava"), Chain(2), Pruning(0.5, layers=n)) for n in (None, None, (-1,))]
    for drafter in drafters[:2]:
        drafter.open(1, context)
    with pytest.raises(ModelError, match="choose the same for all"):
        drafters[2].open(1, context)


def test_it_keeps_what_the_target_looks_at() -> None:
    name, whole = "qwen2_5_vl", prompt("qwen2_5_vl")
    pruning = Pruning(keep_by="attention", keep_images=0.5)
    session, context = loaded(pruned(draft(name), Chain(2), pruning), name, whole)
    columns = context.last.columns  # type: ignore[attr-defined]
    assert columns is not None
    places = family_of(target(name).config).visual_mask(whole.ids).nonzero()[:, 0]
    best = places[columns[places].topk(len(places) // 2).indices].tolist()
    dropped = session.context.dropped(0)
    assert sorted([*best, *dropped]) == places.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_second_turn_keeps_the_gaps_of_the_first(name: str) -> None:
    case, first = FAMILIES[name], prompt(name)
    (longer,) = split(target(name).config, case.continued("image", 0, NEW[2]))
    session, context = loaded(pruned(draft(name), Chain(2), Pruning(keep_images=0.5)), name, first, room=80)
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
    drafter = pruned(draft(name), Chain(2), Pruning(keep_by="attention", keep_images=0.25))
    used, context = loaded(drafter, name, first)
    fresh, _ = loaded(drafter, name, other)
    before = list(used.context.dropped(0))
    context.forget(0)
    used.load(0, other, context.load(0, other))
    assert used.context.dropped(0) == fresh.context.dropped(0)
    assert before != fresh.context.dropped(0), "the two questions look at the same: the test shows nothing"
    for one, two in zip(proposals(used), proposals(fresh), strict=True):
        assert torch.equal(one.tokens, two.tokens)


def test_self_speculation_looks_once_at_an_image_of_a_later_turn() -> None:
    """The drafter goes on a few words before the target, which holds what was accepted last already."""
    case, pruning = FAMILIES["qwen3_vl"], Pruning(keep_images=0.5)
    own, other = Target(case.model()), Target(case.model())
    looks: list[int] = []
    own.model.base_model.visual.register_forward_hook(lambda *_: looks.append(1))
    courses = []
    for model in (own, other):  # the other one has the same weights, but looks for itself
        engine, course = Engine(own, pruned(model, Chain(3), pruning)), []
        for count in (6, 9):
            session: Any = engine.open(1)
            starts = noted_starts(session.drafting)
            inputs = case.row_inputs("image", 0)
            for turn in range(2):
                looks.clear()
                (question,) = split(own.config, inputs)
                (output,) = engine.generate([Request(question)], max_new_tokens=count, session=session)
                assert len(looks) == 1
                reused = output.stats.reused_tokens, starts[-1]
                course.append((output.tokens, output.stats.accepted_histogram, turn, reused))
                inputs = case.continued("image", 0, output.tokens)
        courses.append(course)
    assert courses[0] == courses[1]
    assert any(turn and target_held > held for *_, turn, (target_held, held) in courses[0])
