"""The public surface, on complete tiny checkpoints: load, generate and stream."""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, GenerationConfig, TextIteratorStreamer

from checkpoints import picture, ready, saved_picture, says, text, tokenizer, vlm
from saccade import VLM, InputError, MethodError, ModelError, hf, load
from saccade.checkpoints import inspect_checkpoint
from saccade.inputs.media import Video
from saccade.inputs.processor import RowInput
from saccade.model_spec import ModelSpec
from saccade.pocket import draw
from saccade.processors import stateless
from saccade.target_model.adapter import Target
from saccade.vlm import check

PAIRS = [("llava", "llava-draft"), ("llava", "llava-small-images"), ("llava", "llama"), ("qwen", "qwen-draft")]
PAIRS += [("llama", "llama"), ("llava", None), ("llama", None)]


def reference(name: str, question: Any, images: Any = (), **options: Any) -> list[int]:
    """Plain decoding's tokens."""
    answer: list[int] = vlm(name, method="plain").generate(question, images, **options).tokens
    return answer


def test_a_prediction_is_text_in_which_no_control_token_is_one() -> None:
    model = vlm("llava")
    request = model.request(RowInput("What is it?", [picture(1)], prediction="A cat.<image></s>"), 0)
    assert model.processor.decode(request.prediction) == "A cat.<image></s>"
    assert not {*request.prediction} & {*model.processor.tokenizer.all_special_ids}
    assert model.request(RowInput("What is it?"), 0).prediction == ()


# -- one question, and several -----------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_a_drafter_of_any_kind_changes_no_token(target: str, drafter: str | None) -> None:
    """A draft VLM, one that wants images of another size, one without eyes, none."""
    images = [] if target == "llama" else [picture(3)]
    output = vlm(target, drafter).generate("What is it?", images)
    assert output.tokens == reference(target, "What is it?", images)
    assert output.lossless
    assert output.finish_reason == "length"
    if drafter is not None:
        assert output.stats.drafted_tokens > 0


def test_the_checkpoints_own_layer_is_read_once() -> None:
    model = vlm("predicting")
    heads = {id(other.engine.drafter.head) for other in (model, model.using("mtp", gamma=4))}  # type: ignore[union-attr]
    assert len(heads) == 1


@pytest.mark.parametrize(("target", "drafter"), [("llava", "llava-draft"), ("qwen", "qwen-draft")])
def test_a_batch_of_mixed_questions_equals_single_ones(target: str, drafter: str) -> None:
    model = vlm(target, drafter)
    conversation = [*says({"type": "image"}, text("And here?")), {"role": "assistant", "content": "A cat."}]
    questions = [
        "What is it?",
        "No picture at all, but many more words than elsewhere",
        [*conversation, *says(text("Sure?"))],
        model.processor.prompt("A ready prompt", [picture(5)]),
    ]
    images = [[picture(1), picture(2)], [], [picture(3)], []]
    outputs = model.generate(questions, images)
    assert [o.tokens for o in outputs] == [
        reference(target, question, of) for question, of in zip(questions, images, strict=True)
    ]


def test_the_answer_to_a_film_that_lasts_longer_than_its_question_is_generates_in_every_turn() -> None:
    model = vlm("qwen", "qwen-draft")
    film = Video([np.asarray(picture(n)) for n in range(8)], times=[0, 1, 2, 3, 10, 11, 30, 31])
    prompt = model.processor.prompt("What happens?", videos=[film])
    ids = torch.tensor([prompt.ids])
    types = 2 * (ids == model.target.config.video_token_id)
    made = model.target.model.generate(ids, mm_token_type_ids=types, max_new_tokens=16, **prompt.media[0].tensors)
    for other in (model.using("plain"), model, model.using("dynamic-tree")):
        chat = other.chat()
        first = chat.send("What happens?", videos=[film], max_new_tokens=16)
        assert first.tokens == made[0, ids.shape[1] :].tolist()
        again = chat.send("And then?", max_new_tokens=16)
        assert again.tokens == reference("qwen", chat.messages[:-1], max_new_tokens=16)


def test_a_batch_of_one_is_a_list_of_one() -> None:
    (output,) = vlm("llama").generate(["Hello"])
    assert output.tokens == reference("llama", "Hello")


def test_messages_may_carry_their_images(tmp_path: Path) -> None:
    file = saved_picture(tmp_path / "a.png", 4)
    openai = says({"type": "image_url", "image_url": {"url": Path(file).as_uri()}}, text("What?"))
    expected = reference("llava", "What?", [picture(4)])
    for question, images in ((openai, ()), (says({"type": "image"}, text("What?")), [file]), ("What?", file)):
        assert vlm("llava", "llava-draft").generate(question, images).tokens == expected


def test_a_ready_prompt_is_drafted_from_text_alone_under_another_vision_tower() -> None:
    prompt = vlm("llava").processor.prompt("What?", [picture(1)])
    for drafter in ("llava-draft", "llava-small-images", "llama"):
        assert vlm("llava", drafter).generate(prompt).tokens == reference("llava", prompt)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"target": b"pocket"}, r"The target must be a folder, a hub id or a loaded model, not b'pocket'\."),
        ({"target": None}, "The target must be a folder"),
        ({"target": "pocket", "drafter": ["pocket"]}, r"The drafter must be a folder.* not \['pocket'\]\."),
        ({"target": "pocket", "threads": "2"}, "threads must be a whole number of at least 1, not '2'"),
    ],
)
def test_what_is_no_model_is_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises((InputError, ModelError), match=problem):
        load(**arguments)
    with pytest.raises(ModelError, match="The target must be a folder"):
        load(load("pocket").heads["eagle2"])


def test_no_heads_may_be_said_by_none() -> None:
    assert not load(ready("llava"), method="plain", heads=None).heads  # type: ignore[arg-type]


def test_a_ready_prompt_with_images_beside_it_is_refused() -> None:
    prompt = vlm("llava").processor.prompt("What?", [picture(1)])
    with pytest.raises(InputError, match="A Prompt holds its media already"):
        vlm("llava").generate(prompt, [picture(1)])


# -- sampling and options ----------------------------------------------------------------------------------


def test_a_seed_repeats_a_sample_also_inside_a_batch() -> None:
    model = vlm("llava", "llava-draft")
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.3}
    first = model.generate("Tell", [picture()], seed=7, **options)
    assert model.generate("Tell", [picture()], seed=7, **options).tokens == first.tokens
    assert model.generate("Tell", [picture()], seed=8, **options).tokens != first.tokens
    both = model.generate(["Tell", "Tell"], [[picture()], [picture()]], seed=6, **options)
    assert both[1].tokens == first.tokens
    swapped = model.generate(["Tell", "Tell"], [[picture()], [picture()]], seed=[7, 6], **options)
    assert [o.tokens for o in swapped] == [both[1].tokens, both[0].tokens]


@pytest.mark.parametrize("method", ["chain", "sage", "tabed", "hivis", "dream"])
def test_a_seed_repeats_a_later_turn_whether_or_not_its_row_drafted_the_earlier_one(method: str) -> None:
    sample, options = draw(425, "scene"), {} if method in ("sage", "tabed") else {"tree": "sage"}
    model = load("pocket").using(method, **options)
    first = sample.messages()
    later = [*first, {"role": "assistant", "content": sample.answer}, {"role": "user", "content": sample.question}]
    answers = []
    for turns in ([first, later], [later]):
        with model.batch(max_rows=1) as batch:
            for turn in turns[:-1]:
                batch.add(turn, max_new_tokens=64).result()
            answers.append(batch.add(later, do_sample=True, temperature=1.0, seed=3, max_new_tokens=64).result())
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].stats.reused_tokens > answers[1].stats.reused_tokens, "the prefix was still there"


def test_without_a_seed_torch_decides() -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.3}
    answers = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append(vlm("llama").generate("Tell", **options).tokens)
    assert answers[0] == answers[1] != answers[2]


def test_a_generation_config_counts_and_options_override_it() -> None:
    config = GenerationConfig(max_new_tokens=5, do_sample=True, temperature=1.5)
    sampled = vlm("llama").generate("Tell", generation_config=config, seed=1)
    assert sampled.stats.new_tokens == 5
    assert vlm("llama").generate("Tell", generation_config=config, do_sample=False).tokens == reference(
        "llama", "Tell", max_new_tokens=5
    )
    assert vlm("llama").generate("Tell", generation_config=config, max_new_tokens=3).stats.new_tokens == 3
    assert config.max_new_tokens == 5


def test_loaded_models_can_be_given() -> None:
    model = load(vlm("llava").target.model, vlm("llava-draft").target.model, gamma=2)
    assert model.method == "auto"
    assert model.generate("What?", [picture()]).tokens == reference("llava", "What?", [picture()])
    own = VLM(vlm("llava").target.model, vlm("llava").processor)
    assert own.method == "suffix"


def test_the_drafter_may_be_called_the_assistant_model() -> None:
    model = load(vlm("llava").target.model, assistant_model=vlm("llava-draft").target.model, num_assistant_tokens=2)
    assert (model.method, model.options["gamma"]) == ("auto", 2)
    with pytest.raises(MethodError, match="drafter and assistant_model are two names"):
        load("a", "b", assistant_model="b")


@pytest.mark.parametrize(
    ("target", "has_gpu", "given", "place"),
    [("some/model", True, None, "cuda"), ("some/model", True, "cpu", "cpu"), ("some/model", False, None, None),
     ("pocket", True, None, None)],
)  # fmt: skip
def test_models_go_to_a_gpu_unless_a_device_is_given(
    monkeypatch: pytest.MonkeyPatch, target: str, has_gpu: bool, given: str | None, place: str | None
) -> None:
    places: list[Any] = []

    def stop(device_map: Any) -> None:
        places.append(device_map)
        raise KeyError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr("saccade.resolution.check_device", stop)
    with pytest.raises(KeyError):
        load(target, device_map=given)
    assert places == [place]


# -- streams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama-bytes"])
def test_pieces_join_to_the_text_when_a_stream_is_left_and_read_on(name: str) -> None:
    whole = reference(name, "Say", max_new_tokens=80)
    stream = vlm(name, method="prompt-lookup").stream("Say", max_new_tokens=80)
    pieces: list[str] = []
    for stop in (3, 20, 100):
        for chunk in stream:
            pieces.append(chunk.text)
            if len(stream.output.tokens) > stop:
                assert stream.output.finish_reason == "interrupted"
                assert stream.output.tokens == whole[: len(stream.output.tokens)]
                break
    assert stream.output.finish_reason == "length"
    assert "".join(pieces) == stream.output.text


def test_a_hugging_face_streamer_is_fed() -> None:
    model = vlm("llava", "llava-draft")
    streamer = TextIteratorStreamer(model.processor.tokenizer, skip_prompt=True, timeout=60)
    outputs = []
    thread = Thread(target=lambda: outputs.append(model.generate("What?", [picture()], streamer=streamer)))
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == outputs[0].text
    with pytest.raises(InputError, match="A streamer takes one row"):
        model.generate(["a", "b"], streamer=streamer)


def test_a_streamer_ends_when_generation_fails() -> None:
    """Its reader would otherwise wait without end."""
    streamer = TextIteratorStreamer(vlm("llama").processor.tokenizer, skip_prompt=True, timeout=5)

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        vlm("llama").generate("Say", streamer=streamer, logits_processor=[stateless(fail)])
    assert "".join(streamer) == ""


# -- assistants of Gemma 4 ----------------------------------------------------------------------------------


@pytest.fixture
def folders() -> tuple[str, str]:
    """A target with its tokenizer, and an assistant with weights alone."""
    return str(ready("gemma4")), str(ready("gemma4-assistant"))


def test_an_assistant_drafts_through_every_surface(folders: tuple[str, str]) -> None:
    plain = load(folders[0], method="plain")
    expected = [plain.generate(text, max_new_tokens=12).tokens for text in ("One", "Two words")]
    for method in (None, "chain", "dynamic-tree", "lookup-merge"):
        model = load(*folders, method=method)
        assert isinstance(model.draft_model, Target)
        assert model.method == (method or "auto")
        assert [output.tokens for output in model.generate(["One", "Two words"], max_new_tokens=12)] == expected
    ids = plain.processor.tokenizer("Once", return_tensors="pt").input_ids
    stock, speculation = plain.target.model, hf.speculate(model.draft_model.model, "chain")
    given = stock.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(stock.generate(ids, max_new_tokens=12, do_sample=False, custom_generate=speculation), given)


def test_methods_that_change_the_drafters_prompt_refuse_an_assistant(folders: tuple[str, str]) -> None:
    for method in ("specvlm", "tabed"):
        with pytest.raises(MethodError, match="an assistant has no prompt of its own"):
            load(*folders, method=method)


def test_an_assistant_is_inspected_and_compared_before_weights_are_read(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    found = inspect_checkpoint(folders[1], folders[0])
    assert (found.holds, found.kind, found.fits) == ("assistant", "Gemma4AssistantForCausalLM", True)
    assert found.facts["target's hidden size"] == 16
    assert [(check.what, check.head, check.target) for check in found.checks][:2] == [
        ("hidden size", 16, 16),
        ("vocabulary", *[len(tokenizer())] * 2),
    ]
    config = AutoConfig.from_pretrained(folders[1])
    config.backbone_hidden_size = 24
    other = shutil.copytree(folders[1], tmp_path / "other")
    config.save_pretrained(other)
    found = inspect_checkpoint(other, folders[0])
    assert [check.what for check in found.checks if not check.fits] == ["hidden size"]
    assert found.fits is False
    with pytest.raises(ModelError, match="its hidden size is 24 but this target's is 16"):
        check(ModelSpec(folders[0], other))


def test_an_assistant_alone_is_refused_before_its_tokenizer_is_missed(folders: tuple[str, str]) -> None:
    with pytest.raises(ModelError, match="is an assistant, which drafts for another model and cannot answer alone"):
        check(ModelSpec(folders[1]))
