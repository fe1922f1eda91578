"""Features in training equal those in drafting; what no head reads is not kept, and logits come in chunks."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train_kit import fed, head, listed, lm_head, prompt, samples, target

from families import FAMILIES
from saccade.draft.heads.dream import Dream
from saccade.draft.heads.head import Head
from saccade.errors import ModelError
from saccade.inputs.families import family_of
from saccade.inputs.families.family import Prompt
from saccade.target_model.context import Context
from saccade.train import Recipe, Stage, Trainer
from saccade.train.data import TrainingSample
from saccade.train.feature_cache import FeatureCache
from saccade.train.features import Features, answer_mask, extract_features
from saccade.train.objectives import losses
from saccade.train.objectives.dream import DreamFeeder, DreamObjective
from saccade.train.objectives.entries import Feeder, entries_of
from saccade.train.plan import plan_of
from saccade.train.recipe import objective_of

CLOSE = {"rtol": 0.0, "atol": 1e-4}
"""fp32 sums in another order differ by up to 5e-6 here; a neighbouring token's state differs by more than 1."""


def drafting(name: str, sample: TrainingSample, layers: tuple[int, ...]) -> dict[int, Tensor]:
    """States as the engine gives them: the prompt in one prefill, the answer in one verification pass."""
    context = Context(target(name), 1)
    context.requirements.add_layers(*layers)
    context.cache.reserve(0, len(sample.ids))
    first = context.load(0, sample.prompt).hidden
    after = context.forward([0], torch.tensor([sample.answer])).hidden
    return {i: torch.cat([first[i], after[i][0]]) for i in layers}


def assert_same(features: Features, expected: dict[int, Tensor], last: int, close: dict[str, float] = CLOSE) -> None:
    torch.testing.assert_close(features.embeddings, expected[0], **close)
    torch.testing.assert_close(features.states[1], expected[1], **close)
    torch.testing.assert_close(features.states[last], expected[last], **close)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma3n"])
def test_a_padded_batch_of_every_kind_of_prompt_gives_what_drafting_sees(name: str) -> None:
    own, given = target(name), samples(name, 4)
    last = len(own.layers)
    # transformers limits Mamba-2's steps in this pass, and not in those of decoded tokens
    close = {"rtol": 0.0, "atol": 1e-3} if name == "nemotron_h" else CLOSE
    for sample, features in zip(given, extract_features(own, given, (1,)), strict=True):
        assert features.ids.tolist() == list(sample.ids)
        assert torch.equal(features.visual, family_of(own.config).visual_mask(sample.ids))
        assert_same(features, drafting(name, sample, (0, 1, last)), last, close)


def test_states_between_layers_with_several_streams_are_refused() -> None:
    with pytest.raises(ModelError, match="several residual streams"):
        extract_features(target("gemma3n"), samples("gemma3n", 1), (1,))


def test_videos_of_several_lengths_in_one_batch_give_what_drafting_sees() -> None:
    own, long = target("llava_onevision"), TrainingSample("long", prompt("llava_onevision", "video"), (20, 21, 22))
    video = long.prompt.media[0]
    frames = video.tensors["pixel_values_videos"]
    gone = (video.n_tokens - 1) // frames.shape[1]  # the tokens of one frame
    first = long.prompt.ids.index(int(own.config.video_token_index))
    shorter = replace(video, tensors={"pixel_values_videos": frames[:, 1:]}, n_tokens=video.n_tokens - gone)
    ids = long.prompt.ids[:first] + long.prompt.ids[first + gone :]
    short = TrainingSample("short", Prompt(ids, (shorter,)), (20, 21))
    last = len(own.layers)
    given = [long, short, short, long, short]
    for sample, features in zip(given, extract_features(own, given, (1,)), strict=True):
        assert_same(features, drafting("llava_onevision", sample, (0, 1, last)), last)


def test_the_last_prompt_token_learns_the_answers_first_and_the_last_answer_token_learns_nothing() -> None:
    #     prompt: 0 1 2   answer: 3 4 5
    assert answer_mask(3, 6).tolist() == [False, False, True, True, True, False]


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "gemma3"])
def test_the_lm_head_makes_the_targets_own_logits_of_the_last_states(name: str) -> None:
    own, sample = target(name), samples(name, 1)[0]
    [features] = extract_features(own, [sample], ())
    context = Context(own, 1)
    logits = context.load(0, sample.prompt).logits
    ours = own.model.get_output_embeddings()(features.states[len(own.layers)][len(sample.prompt) - 1])
    torch.testing.assert_close(ours, logits, **CLOSE)


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
def test_entries_of_eagle_pair_states_with_the_next_tokens_embedding_and_the_one_after_to_guess(kind: str) -> None:
    own, given, made_by = target("llava"), samples("llava", 3), head("llava", kind)
    read = extract_features(own, given, made_by.layers)
    made = entries_of(made_by, read)
    last = len(own.layers)
    for row, (sample, features) in enumerate(zip(given, read, strict=True)):
        count = len(sample.ids) - 1
        states = torch.cat([features.states[layer] for layer in made_by.layers], -1)
        assert torch.equal(made.features[row, :count], states[:-1])
        assert torch.equal(made.embeddings[row, :count], features.embeddings[1:])
        assert torch.equal(made.states[row, :count], features.states[last][1:])
        assert made.following[row, : count - 1].tolist() == list(sample.ids[2:])
        supervised = made.supervised[row].nonzero()[:, 0].tolist()
        assert made.following[row, supervised].tolist() == list(sample.answer)


@pytest.mark.parametrize(("after_image", "source"), [("text", "before the image"), ("visual", "its end")])
def test_entries_of_hivis_are_those_of_text_alone(after_image: str, source: str) -> None:
    own = target("llava")
    sample = TrainingSample("one", prompt("llava", "image"), (30, 31, 32))
    [features] = extract_features(own, [sample], ())
    made = entries_of(head("llava", "hivis", after_image=after_image), [features])
    text = [i for i, hidden in enumerate(features.visual.tolist()) if not hidden]
    states = features.states[len(own.layers)]
    assert made.features.shape[1] == len(text) - 1
    assert torch.equal(made.embeddings[0], features.embeddings[text[1:]])
    assert torch.equal(made.states[0], states[text[1:]])
    after = next(i for i in range(1, len(text)) if text[i] - text[i - 1] > 1)  # first text token after the image
    feature = {"before the image": text[after - 1], "its end": text[after] - 1}[source]
    assert torch.equal(made.features[0, after - 1], states[feature])
    assert made.following[made.supervised].tolist() == [30, 31, 32]


KINDS = ("eagle2", "eagle3", "msd", "vispec", "hivis", "dream", "medusa", "hydra", "kangaroo")


def feeder(own: Head, name: str = "llava") -> Feeder:
    source = listed(name, 3)
    if isinstance(own, Dream):
        return DreamFeeder(target(name), own, source, objective=DreamObjective())
    return Feeder(target(name), own, source)


def judged(own: Head, given: Feeder, lm_head: Any, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    entries = fed(given, range(3))
    assert entries is not None
    loss = objective_of(own.kind)()(own, entries, lm_head, steps).loss
    own.zero_grad()
    loss.backward()
    return loss.detach(), {n: w.grad.clone() for n, w in own.named_parameters() if w.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Up to the order of float32 sums, which is a millionth of a gradient's norm."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


def steps_of(kind: str) -> int:
    return 1 if kind == "kangaroo" else 2


@pytest.mark.parametrize(("kind", "where"), [*zip(KINDS, ["memory", "disk"] * 5, strict=False)])
def test_what_a_cache_leaves_out_is_never_read(kind: str, where: str, tmp_path: Path) -> None:
    own = head("llava", kind)
    given = feeder(own)
    plain = judged(own, given, lm_head, steps_of(kind))
    given.cache = FeatureCache(target("llava"), 1e9, tmp_path if where == "disk" else None, "x", needed=given.needed)
    fed(given, range(3))
    given.cache.flush()
    cached = judged(own, given, lm_head, steps_of(kind))
    torch.testing.assert_close(cached[0], plain[0], rtol=1e-5, atol=1e-6)
    assert_same_gradients(cached[1], plain[1])


def test_a_state_that_is_read_and_not_kept_is_noticed() -> None:
    own = head("llava", "eagle2")
    given = feeder(own)
    plain = judged(own, given, lm_head, 2)
    hivis = feeder(head("llava", "hivis"))
    given.cache = FeatureCache(target("llava"), 1e9, needed=hivis.needed)
    fed(given, range(3))
    assert not torch.allclose(judged(own, given, lm_head, 2)[0], plain[0], rtol=1e-4)


def test_hivis_keeps_the_states_of_text_and_nothing_of_pictures() -> None:
    given = feeder(head("llava", "hivis"))
    features = given.features(range(3))
    cache = FeatureCache(target("llava"), 1e9, needed=given.needed)
    whole = FeatureCache(target("llava"), 1e9)
    width = target("llava").text_config.hidden_size * features[0].embeddings.element_size()
    pictured = next(f for f in features if f.visual.any())
    text, tokens = int((~pictured.visual).sum()), len(pictured.ids)
    marks = tokens * (8 + 1) + 8 * len(pictured.stops)  # ids, answer, stops
    assert cache.bytes_of(pictured) == (text - 1) * width + marks  # the last token's state says nothing
    assert whole.bytes_of(pictured) == (tokens + tokens - text) * width + marks


@pytest.mark.parametrize("kind", ["hivis", "dream", "medusa"])
def test_logits_in_chunks_give_the_same_loss_and_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = head("llava", kind)
    given = feeder(own)
    whole = judged(own, given, lm_head, steps_of(kind))
    monkeypatch.setattr(losses, "LOGITS", 3 * target("llava").vocab_size)
    places: list[int] = []

    def counting(states: Tensor) -> Tensor:
        places.append(states[..., 0].numel())
        return lm_head(states)

    cut = judged(own, given, counting, steps_of(kind))
    assert max(places) == 3
    torch.testing.assert_close(cut[0], whole[0], rtol=1e-5, atol=1e-6)
    assert_same_gradients(cut[1], whole[1])


SHARING: dict[str, Any] = {"hivis": {}, "eagle2": {}, "medusa": {}, "blind": {"text_only": True}}
"""Heads that read the target's last layer, and nothing that depends on the head; the first reads least."""
APART: dict[str, Any] = {"kangaroo": {}, "dream": {}, "dream-whole": {"keep": 1.0}}
"""Heads that read otherwise."""


def trained(name: str, out: Path, features: Path | None) -> dict[str, Tensor]:
    kind = "eagle2" if name == "blind" else name.partition("-")[0]
    recipe = Recipe(
        kind=kind,
        stages=(Stage(1, 1e-3),),
        head=(SHARING | APART)[name],
        feature_cache="disk",
        batch_size=4,
        micro_batch=2,
        validation_samples=0,
    )
    trainer = Trainer(target("llava"), recipe, listed("llava", 6), out / name, features=features, say=lambda _: None)
    trainer.run()
    return dict(trainer.learner.module.state_dict())


def test_heads_of_the_same_layers_share_a_cache_and_others_leave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All train as without a shared one."""
    expected = {name: trained(name, tmp_path / "alone", None) for name in SHARING | APART}
    shared = tmp_path / "states"
    weights = {name: trained(name, tmp_path, shared) for name in ("hivis", *APART)}
    assert len(list(shared.iterdir())) == 1 + len(APART)
    monkeypatch.setattr(Feeder, "_extract", lambda *_: pytest.fail("the target ran again"))
    weights |= {name: trained(name, tmp_path, shared) for name in SHARING if name != "hivis"}
    for name, state in expected.items():
        assert all(torch.equal(weights[name][key], weight) for key, weight in state.items()), name
    assert not (tmp_path / "hivis" / "features").exists()


def test_a_plan_counts_what_features_take(tmp_path: Path) -> None:
    recipe = Recipe(kind="hivis", stages=(Stage(4, 1e-3),), batch_size=4, validation_samples=0, cache_gb=1e-6)
    trainer = Trainer(target("llava"), recipe, listed("llava", 12), tmp_path, say=str)
    given = feeder(head("llava", "hivis"))
    cache = FeatureCache(target("llava"), 1e9, needed=given.needed)
    each = [cache.bytes_of(f) for f in given.features(range(3))]
    for where, words in (
        ("none", "not cached (feature_cache=none)"),
        ("disk", "cached on disk (cache_gb=1e-06), room for"),
    ):
        [line] = [line for line in plan_of(trainer, (where, 1e3)).splitlines() if line.startswith("features")]
        assert words in line
        counted = int(re.search("about ([0-9,]+) bytes a sample", line)[1].replace(",", ""))  # type: ignore[index]
        assert min(each) / 2 < counted < max(each) * 2


def read(name: str = "llava") -> list[Features]:
    return [features for s in samples(name, 4) for features in extract_features(target(name), [s], (1,))]


def test_nothing_is_kept_past_the_limit() -> None:
    cache = FeatureCache(target("llava"), 20_000)
    for index, features in enumerate(read()):
        cache.put(index, features)
    assert 0 < cache.samples < 4
    assert cache.bytes <= 20_000
    assert cache.get(3) is None
    assert f"{cache.bytes // cache.samples} bytes each" in str(cache)


def test_a_damaged_file_is_named_and_forgotten(tmp_path: Path) -> None:
    cache = FeatureCache(target("llava"), 1e9, tmp_path / "f")
    cache.put(0, read()[0])
    cache.flush()
    [place] = (tmp_path / "f").glob("*/*.safetensors")
    content = bytearray(place.read_bytes())
    content[-1] ^= 1
    place.write_bytes(content)
    messages: list[str] = []
    again = FeatureCache(target("llava"), 1e9, tmp_path / "f", say=messages.append)
    assert again.get(0) is None
    assert len(messages) == 1
    assert str(place) in messages[0]
    assert not place.exists()
