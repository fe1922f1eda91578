"""Features in training equal those in drafting, token for token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from train_kit import head, prompt, samples, target

from families import FAMILIES
from saccade.inputs.families import visual_mask
from saccade.inputs.families.family import Prompt
from saccade.target_model.context import Context
from saccade.train.data import TrainingSample
from saccade.train.features import Features, answer_mask, read_features
from saccade.train.objectives.entries import entries_of

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


def assert_same(features: Features, expected: dict[int, Tensor], last: int) -> None:
    torch.testing.assert_close(features.embeddings, expected[0], **CLOSE)
    torch.testing.assert_close(features.states[1], expected[1], **CLOSE)
    torch.testing.assert_close(features.states[last], expected[last], **CLOSE)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_padded_batch_of_every_kind_of_prompt_gives_what_drafting_sees(name: str) -> None:
    own, given = target(name), samples(name, 4)
    last = len(own.layers)
    for sample, features in zip(given, read_features(own, given, (1,)), strict=True):
        assert features.ids.tolist() == list(sample.ids)
        assert torch.equal(features.visual, visual_mask(own.config, sample.ids))
        assert_same(features, drafting(name, sample, (0, 1, last)), last)


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
    for sample, features in zip(given, read_features(own, given, (1,)), strict=True):
        assert_same(features, drafting("llava_onevision", sample, (0, 1, last)), last)


def test_the_last_prompt_token_learns_the_answers_first_and_the_last_answer_token_learns_nothing() -> None:
    #     prompt: 0 1 2   answer: 3 4 5
    assert answer_mask(3, 6).tolist() == [False, False, True, True, True, False]


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "gemma3"])
def test_the_lm_head_makes_the_targets_own_logits_of_the_last_states(name: str) -> None:
    own, sample = target(name), samples(name, 1)[0]
    [features] = read_features(own, [sample], ())
    context = Context(own, 1)
    logits = context.load(0, sample.prompt).logits
    ours = own.model.get_output_embeddings()(features.states[len(own.layers)][len(sample.prompt) - 1])
    torch.testing.assert_close(ours, logits, **CLOSE)


def test_entries_of_eagle_pair_a_state_with_the_next_tokens_embedding_and_the_one_after_to_guess() -> None:
    own, given = target("llava"), samples("llava", 3)
    read = read_features(own, given, ())
    made = entries_of(head("llava", "eagle2"), read)
    last = len(own.layers)
    for row, (sample, features) in enumerate(zip(given, read, strict=True)):
        count = len(sample.ids) - 1
        assert torch.equal(made.features[row, :count], features.states[last][:-1])
        assert torch.equal(made.embeddings[row, :count], features.embeddings[1:])
        assert torch.equal(made.states[row, :count], features.states[last][1:])
        assert made.following[row, : count - 1].tolist() == list(sample.ids[2:])
        supervised = made.supervised[row].nonzero()[:, 0].tolist()
        assert made.following[row, supervised].tolist() == list(sample.answer)


@pytest.mark.parametrize(("after_image", "source"), [("text", "before the image"), ("visual", "its end")])
def test_entries_of_hivis_are_those_of_text_alone(after_image: str, source: str) -> None:
    own = target("llava")
    sample = TrainingSample("one", prompt("llava", "image"), (30, 31, 32))
    [features] = read_features(own, [sample], ())
    made = entries_of(head("llava", "hivis", after_image=after_image), [features])
    text = [i for i, hidden in enumerate(features.visual.tolist()) if not hidden]
    states = features.states[len(own.layers)]
    assert made.features.shape[1] == len(text) - 1
    assert torch.equal(made.embeddings[0], features.embeddings[text[1:]])
    assert torch.equal(made.states[0], states[text[1:]])
    behind = next(i for i in range(1, len(text)) if text[i] - text[i - 1] > 1)  # first text token after the image
    feature = {"before the image": text[behind - 1], "its end": text[behind] - 1}[source]
    assert torch.equal(made.features[0, behind - 1], states[feature])
    assert made.following[made.supervised].tolist() == [30, 31, 32]


def test_a_head_that_reads_two_layers_gets_them_side_by_side() -> None:
    own, sample = target("llava"), samples("llava", 1)[0]
    [features] = read_features(own, [sample], (1,))
    made = head("llava", "eagle2")
    object.__setattr__(made.config, "layers", (1, 2))
    width = own.text_config.hidden_size
    entries = entries_of(made, [features])
    assert torch.equal(entries.features[0, :, :width], features.states[1][:-1])
    assert torch.equal(entries.features[0, :, width:], features.states[2][:-1])
