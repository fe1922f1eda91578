"""lmms-eval's plug-in against a stand-in for lmms-eval: order of arguments, media, settings, scores and speed."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_evaluators as fake
import pytest
import torch
from PIL import Image

import saccade.evaluators.evaluated_model as core
from saccade.engine.step import StepRunner
from saccade.errors import InputError, MethodError, SaccadeError
from saccade.inputs.families import family_of
from saccade.pocket import Sample, draw
from saccade.vlm import VLM, load

ROOT = Path(__file__).parents[2]
MOST = 12
LIMIT = {"max_new_tokens": MOST, "until": []}


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return load("pocket", method="chain", dtype="float32")


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch, vlm: VLM) -> fake.Logs:
    """The stand-in, with one loaded pair for all models."""
    monkeypatch.setattr(core, "load", lambda **given: vlm.using(given.get("method", "chain")))
    return fake.install_lmms_eval(monkeypatch)


def model_of(kind: str, **given: Any) -> Any:
    """A model, created as lmms-eval creates it."""
    import saccade.evaluators

    manifest = saccade.evaluators.lmms_eval_models()
    path = manifest.chat_class_path if kind == "chat" else manifest.simple_class_path
    module, _, name = path.rpartition(".")
    arguments = ",".join(f"{key}={value}" for key, value in {"target": "pocket", **given}.items())
    rest = {"batch_size": 2, "max_batch_size": None, "device": None}
    return getattr(importlib.import_module(module), name).create_from_arg_string(arguments, rest)


def samples(task: str, count: int) -> list[Sample]:
    return [draw(700_000 + n, task) for n in range(count)]


def task_of(found: list[Sample], name: str = "a_task", **settings: Any) -> fake.Task:
    docs = [{"sample": sample} for sample in found]
    visuals = lambda doc: list(doc["sample"].images)  # noqa: E731
    return fake.Task(name, docs, lambda doc: doc["sample"].question, visuals, {**LIMIT, **settings})


def plain(vlm: VLM, messages: Any, **options: Any) -> str:
    return vlm.using("plain").generate(messages, max_new_tokens=MOST, do_sample=False, **options).text


def test_the_entry_point_names_a_manifest_of_a_chat_and_a_simple_model(logs: fake.Logs) -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["lmms_eval.models"]
    module, _, function = points["saccade"].partition(":")
    assert getattr(importlib.import_module(module), function)().model_id == "saccade"
    assert [model_of(kind).is_simple for kind in ("chat", "simple")] == [False, True]


@pytest.mark.parametrize("kind", ["chat", "simple"])
def test_answers_are_those_of_plain_decoding_in_order_with_every_picture(kind: str, logs: fake.Logs, vlm: VLM) -> None:
    model, found = model_of(kind), samples("difference", 3)
    results = model.generate_until(getattr(task_of(found), kind)(model))
    assert [r.text for r in results] == [plain(vlm, s.messages()) for s in found]
    lengths = [len(vlm.processor.prompt(s.messages()).ids) for s in found]
    assert [r.token_counts.input_tokens for r in results] == lengths
    assert lengths[0] != len(vlm.processor.prompt(found[0].question, images=[found[0].images[0]]).ids)
    assert all(0 < r.token_counts.output_tokens <= MOST for r in results)


def test_a_video_is_handed_over_as_frames_or_as_a_file(logs: fake.Logs, vlm: VLM, tmp_path: Path) -> None:
    pytest.importorskip("av")
    from tools.pocket.files import write_video

    sample = draw(700_000, "video-question")
    assert sample.video is not None
    write_video(tmp_path / "film.mp4", sample.video, sample.fps or 1.0)
    for kind, given in (("simple", list(sample.video)), ("chat", str(tmp_path / "film.mp4"))):
        model = model_of(kind)
        task = fake.Task("films", [{}], lambda doc: sample.question, lambda doc, v=given: [v], LIMIT)
        (result,) = model.generate_until(getattr(task, kind)(model))
        assert result.text == plain(vlm, sample.question, videos=[given])


def test_pictures_go_where_a_simple_tasks_text_has_them(logs: fake.Logs, vlm: VLM) -> None:
    one, two = (s.images[0] for s in samples("scene", 2))

    def messages(text: str) -> Any:
        from saccade.evaluators.lmms_models import with_visuals

        return with_visuals(text, [one, two])

    image_one, image_two = {"type": "image", "image": one}, {"type": "image", "image": two}
    (message,), removed = messages("First <image 2>, then <image 1>: again <image 2>?")
    assert not removed
    words = [{"type": "text", "text": text} for text in ("First ", ", then ", ": again image 2?")]
    assert message["content"] == [words[0], image_two, words[1], image_one, words[2]]
    (message,), removed = messages("<image><image>Compare.")
    assert (message["content"], removed) == ([image_one, image_two, {"type": "text", "text": "Compare."}], False)
    (message,), removed = messages("<image>Compare.")
    assert (message["content"], removed) == ([image_one, image_two, {"type": "text", "text": "Compare."}], True)
    (message,), removed = messages("Compare <image 2> with the other.")
    assert message["content"][0] == image_one, "a picture that is not mentioned comes first"
    model = model_of("simple")
    task = fake.Task("t", [{}], lambda doc: "<image> What?", lambda doc: [one, two], LIMIT)
    model.generate_until(task.simple(model))
    assert any("taken out" in sentence for sentence in logs.sentences)


def test_settings_of_a_task_end_the_answer_are_reported_once_or_refused_before_the_first_one(
    logs: fake.Logs, vlm: VLM
) -> None:
    found = samples("scene", 2)
    whole = plain(vlm, found[0].messages())
    word, model = whole.split()[3], model_of("chat")
    settings = {"until": [word, None, ""], "image_aspect_ratio": "pad", "num_beams": 1, "top_p": 1.0}
    result, _ = model.generate_until(task_of(found, **settings).chat(model))
    assert result.text == whole[: whole.index(word)]
    assert [s for s in logs.sentences if "image_aspect_ratio" in s] == [
        "The task's setting image_aspect_ratio='pad' is left out: the checkpoint's image processor decides how "
        "pictures are scaled."
    ]
    for settings, words in (
        ({"frame_interval": 3}, "frame_interval=3 is not known"),
        ({"num_beams": 4}, "num_beams=4 is not supported"),
        ({"until": 7}, "until must be a string or a list"),
        ({"max_new_tokens": -1}, "max_new_tokens must be a whole number"),
    ):
        model = model_of("chat")
        with pytest.raises(InputError, match=words):
            model.generate_until(task_of(found[:1], **settings).chat(model))
        assert model.model.total["answers"] == 0


def test_an_answer_ends_where_the_first_of_its_stop_strings_begins(logs: fake.Logs, vlm: VLM) -> None:
    """One character completes both, of which the one that is listed last begins earlier."""
    (sample,) = samples("scene", 1)
    text = plain(vlm, sample.messages())
    place = next(i for i in range(3, len(text)) if text[i] not in text[:i])
    model = model_of("chat")
    task = task_of([sample], until=[text[place], text[place - 1 : place + 1]])
    assert [result.text for result in model.generate_until(task.chat(model))] == [text[: place - 1]]


def test_a_setting_of_the_task_wins_over_one_of_the_command_line(logs: fake.Logs) -> None:
    model, found = model_of("chat", max_new_tokens=3), samples("scene", 1)
    silent = fake.Task("t", [{}], lambda doc: found[0].question, lambda doc: list(found[0].images), {"until": []})
    lengths = []
    for task in (task_of(found), silent):
        before = model.model.total["new_tokens"]
        model.generate_until(task.chat(model))
        lengths.append(model.model.total["new_tokens"] - before)
    assert lengths == [MOST, 3]


def test_sampling_follows_the_tasks_temperature_and_torchs_seed(logs: fake.Logs) -> None:
    def answers(seed: int) -> list[str]:
        model = model_of("chat")
        torch.manual_seed(seed)
        task = task_of(samples("scene", 2), temperature=2.0, max_new_tokens=16)
        return [result.text for result in model.generate_until(task.chat(model))]

    first = answers(1)
    assert first == answers(1)
    assert first != answers(2)


def test_speed_stands_beside_the_scores(logs: fake.Logs, tmp_path: Path) -> None:
    path = tmp_path / "results" / "speed.json"
    model = model_of("chat", speed=path)
    one, two = task_of(samples("scene", 2), "scenes"), task_of(samples("count", 1), "counts")
    model.generate_until([*one.chat(model), *two.chat(model)])
    (metrics,) = logs.metrics
    assert metrics["avg_speed"] > 0
    assert metrics["additional_metrics"]["tokens_per_target_pass"] > 1.5
    assert 0 < metrics["additional_metrics"]["acceptance"] <= 1
    found = json.loads(path.read_text())
    assert found["run"]["method"] == "chain"
    assert found["run"]["rows"] == 2
    assert {name: tally["answers"] for name, tally in found["tasks"].items()} == {"scenes": 2, "counts": 1}
    for name in ("new_tokens", "target_passes", "drafted_tokens", "accepted_tokens", "seconds"):
        total = sum(tally[name] for tally in found["tasks"].values())
        assert found["total"][name] == pytest.approx(total, abs=1e-3)
        assert total > 0
    assert metrics["total_gen_tokens"] == found["total"]["new_tokens"]
    assert any("Speed of counts: 1 answer" in sentence for sentence in logs.sentences)


def reference(vlm: VLM, messages: Any, answer: str) -> tuple[float, bool]:
    """Loss and greediness by one forward of the stock model."""
    prompt = vlm.processor.prompt(messages)
    ids = vlm.processor.tokenizer(answer, add_special_tokens=False)["input_ids"]
    given = {"input_ids": torch.tensor([[*prompt.ids, *ids]]), **family_of(vlm.target.config).join(prompt.media)}
    with torch.inference_mode():
        logits = vlm.target.model(**given).logits[0, len(prompt.ids) - 1 : -1].float()
    wanted = torch.tensor(ids)
    return float(torch.nn.functional.cross_entropy(logits, wanted)), bool((logits.argmax(-1) == wanted).all())


def test_continuations_have_the_stock_models_loss_and_the_right_one_the_least(logs: fake.Logs, vlm: VLM) -> None:
    """lmms-eval's scoring of multiple choice takes the least number."""
    model, found = model_of("simple"), samples("scene", 3)
    own = vlm.using("plain").generate(found[0].messages(), do_sample=False, max_new_tokens=24)
    choices = [found[1].answer, own.text, found[2].answer]
    results = model.loglikelihood(task_of(found).continuations(model, choices))
    for (loss, is_greedy), choice in zip(results, choices, strict=True):
        expected, hits = reference(vlm, found[0].messages(), choice)
        assert loss == pytest.approx(expected, abs=1e-4)
        assert is_greedy is hits
    losses = [loss for loss, _ in results]
    assert losses.index(min(losses)) == 1
    assert [greedy for _, greedy in results] == [False, True, False]
    assert model.model.speeds["a_task"]["scored"] == 3
    with pytest.raises(InputError, match=r"a_task, document 0: The continuation is empty"):
        model.loglikelihood(task_of(found).continuations(model, [""]))
    with pytest.raises(InputError, match="--force_simple"):
        model_of("chat").loglikelihood([])


def rounds(first: Sample, second: Sample, seen: list[Any], kind: str) -> Any:
    """The maker of texts (simple) or messages (chat) of a task with two rounds, which notes what it is told."""

    def text(doc: Any, previous_output: Any = None, round_idx: int = 0, previous_round_info: Any = None) -> Any:
        seen.append((round_idx, list(previous_output), previous_round_info))
        return list(second.images), second.question, round_idx == 2, previous_output, {"note": round_idx}

    def messages(
        doc: Any, round_idx: int | None = None, previous_output: Any = None, previous_round_info: Any = None
    ) -> Any:
        if round_idx is None:
            return _turn(first)
        seen.append((round_idx, list(previous_output), previous_round_info))
        return _turn(second), round_idx == 2, previous_output, {"note": round_idx}

    return text if kind == "simple" else messages


def _turn(sample: Sample) -> list[dict[str, Any]]:
    content = [{"type": "image", "url": image} for image in sample.images]
    return [{"role": "user", "content": [*content, {"type": "text", "text": sample.question}]}]


@pytest.mark.parametrize("kind", ["chat", "simple"])
def test_rounds_follow_each_other_until_the_task_ends_them(kind: str, logs: fake.Logs, vlm: VLM) -> None:
    first, second = samples("scene", 2)
    model, seen = model_of(kind), list[Any]()
    model.task_dict["r"] = {"test": [{}, {}]}
    maker = rounds(first, second, seen, kind)
    if kind == "chat":
        given = [fake.Instance(("", maker, LIMIT, n, "r", "test")) for n in range(2)]
    else:
        visual = lambda doc: list(first.images)  # noqa: E731
        given = [fake.Instance((first.question, LIMIT, visual, maker, n, "r", "test")) for n in range(2)]
    results = model.generate_until_multi_round(given)
    expected = [plain(vlm, first.messages()), plain(vlm, second.messages())]
    assert results == [expected, expected]
    assert [entry for entry in seen if entry[0] == 2] == [(2, expected, {"note": 1})] * 2


def test_a_bad_question_ends_the_run_with_its_name_or_is_left_empty(logs: fake.Logs, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.png")

    def visual(doc: dict[str, Any]) -> list[Any]:
        return [missing if doc["bad"] else Image.new("RGB", (96, 96))]

    task = fake.Task("t", [{"bad": False}, {"bad": True}], lambda doc: "What?", visual, {"max_new_tokens": 4})
    model = model_of("simple")
    with pytest.raises(InputError, match=r"t, document 1: .*missing\.png"):
        model.generate_until(task.simple(model))
    model = model_of("simple", skip_failed=True)
    results = model.generate_until(task.simple(model))
    assert results[0].text
    assert results[1].text == ""
    assert model.model.total["failed"] == 1
    assert any("document 1 is left empty" in sentence for sentence in logs.sentences)


def test_questions_of_a_step_that_failed_are_answered_each_alone(
    logs: fake.Logs, vlm: VLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, found = StepRunner.run, samples("scene", 3)

    def failing(runner: StepRunner) -> None:
        if len(runner._state.active) > 1:
            raise torch.OutOfMemoryError("planted")
        stock(runner)

    monkeypatch.setattr(StepRunner, "run", failing)
    model = model_of("chat")
    results = model.generate_until(task_of(found).chat(model))
    assert [result.text for result in results] == [plain(vlm, sample.messages()) for sample in found]
    assert model.model.total["answers"] == 3


def test_audio_and_parts_of_videos_are_refused(logs: fake.Logs) -> None:
    for visual, words in (
        ({"array": [0.0], "sampling_rate": 16_000}, "audio"),
        ("speech.wav", "audio"),
        ({"url": "film.mp4", "video_start": 3.0, "video_end": 4.0}, "part of a video"),
        (3, "type int"),
    ):
        for kind in ("chat", "simple"):
            model = model_of(kind)
            task = fake.Task("t", [{}], lambda doc: "What?", lambda doc, v=visual: [v], LIMIT)
            with pytest.raises(InputError, match=words):
                model.generate_until(getattr(task, kind)(model))


def test_a_limit_beyond_the_context_is_cut_and_the_system_prompt_comes_first(logs: fake.Logs, vlm: VLM) -> None:
    (sample,) = samples("scene", 1)
    model = model_of("chat", system="Be brief.")
    (result,) = model.generate_until(task_of([sample], max_new_tokens=16384).chat(model))
    messages = [{"role": "system", "content": "Be brief."}, *sample.messages()]
    assert result.token_counts.input_tokens == len(vlm.processor.prompt(messages).ids)
    assert sum("more than the model's context" in sentence for sentence in logs.sentences) == 1


def test_arguments_are_checked(logs: fake.Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, words in (
        ({"batch_size": "zero", "target": "pocket"}, "batch_size must be a whole number"),
        ({"target": "pocket", "pretrained": "pocket"}, "Exactly one of target and pretrained"),
        ({}, "Exactly one of target and pretrained"),
        ({"target": "pocket", "heads": "a=x;y"}, "Either all heads have a name"),
        ({"target": "pocket", "temperature": 0.5, "until": 3}, "until must be a string"),
    ):
        with pytest.raises(InputError, match=words):
            core.EvaluatedModel(given, print, ("target", "pretrained"))
    with pytest.raises(InputError, match="--apply_chat_template"):
        _ = model_of("chat").chat_template
    monkeypatch.undo()
    with pytest.raises(MethodError, match="gama"):
        core.EvaluatedModel({"target": "pocket", "method": "chain", "gama": 4}, print)


def test_every_process_has_a_speed_file(logs: fake.Logs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, name in (("0", "speed.json"), ("1", "speed.1.json")):
        monkeypatch.setenv("RANK", rank)
        model_of("chat", speed=tmp_path / "speed.json").model.save()
        assert (tmp_path / name).is_file()
    with pytest.raises(SaccadeError, match="is a folder"):
        model_of("chat", speed=tmp_path)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Modules that were imported with the stand-in do not stay."""
    yield
    sys.modules.pop("saccade.evaluators.lmms_models", None)
