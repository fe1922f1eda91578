"""Suites: built-in ones are sound, and files of the user are read strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench_kit import suite

import saccade
from saccade.bench import suites
from saccade.bench.preparing import prepare
from saccade.bench.questions import gather
from saccade.bench.suites import BASELINE
from saccade.cli.bench import DataOptions, SizeOptions, SuiteOptions
from saccade.errors import InputError, SaccadeError
from saccade.inputs.families.family import Prompt
from saccade.inputs.processor import InputProcessor
from tools.results import catalogue


@pytest.mark.parametrize("name", suites.NAMES)
def test_a_built_in_suite_is_read_and_lists_what_it_lacks(name: str, vlm: saccade.VLM) -> None:
    found = suites.load(name).with_(per_task=1)
    assert found.methods[0].name == BASELINE
    assert found.title
    prepared = prepare(found, vlm)
    left_out = len(found.methods) - len(prepared.methods)
    assert sum(reason.startswith("Method ") for reason in prepared.missing) == left_out
    assert prepared.questions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": 3}, "unknown key 'prompts'; expected one of claims, judge, max_new_tokens"),
        ({"tasks": []}, "tasks is missing or empty"),
        ({"methods": "chain"}, "methods is missing or empty"),
        ({"tasks": [{"name": "mine"}]}, "needs exactly one of task"),
        ({"tasks": [{"task": "scene", "file": "a.jsonl"}]}, "needs exactly one of task"),
        ({"tasks": [{"task": "scene", "color": 1}]}, "unknown key 'color'"),
        ({"tasks": [{"task": "scene", "count": 0}]}, "count of a task must be a whole number of at least 1"),
        ({"tasks": [{"task": "scene", "max_new_tokens": 0}]}, "max_new_tokens of a task must be a whole number"),
        ({"tasks": [{"task": "scene", "scorer": "vqa"}]}, "task 'scene': scorer has no meaning beside task"),
        ({"tasks": [{"file": "a.jsonl", "split": "val"}]}, "task 'a.jsonl': split has no meaning beside file"),
        ({"tasks": [{"file": "a.jsonl", "prompt": "{question}"}]}, "prompt has no meaning beside file"),
        ({"tasks": [{"task": "scene", "schema": {}, "lark": "start: /a/"}]}, "it has a schema and a lark; give one"),
        ({"tasks": [{"task": "scene", "schema": "gone.json"}]}, r"the schema gone.json cannot be read \(No such file"),
        (
            {"tasks": [{"task": "scene", "prediction": {}}]},
            "task 'scene', prediction: a prediction is of plain, of ref",
        ),
        ({"tasks": [{"task": "scene", "prediction": {"of": "ours"}}]}, "a prediction is of plain, of reference, or a"),
        (
            {"tasks": [{"task": "scene", "prediction": {"of": "plain", "wrong": 5}}]},
            "wrong must be a share from 0 to 1",
        ),
        ({"tasks": [{"dataset": "mmmu", "grammar": "verbose"}]}, "grammar has no meaning beside dataset"),
        ({"tasks": ["scene", "scene"]}, "two tasks have the name 'scene'"),
        ({"methods": ["chain", {"name": "chain", "label": "chain"}]}, "two methods have the name 'chain'"),
        ({"methods": [{"gamma": 3}]}, "a method must be a name or a table with one"),
        ({"repeats": 0}, "repeats must be a whole number of at least 1, not 0"),
        ({"repeats": True}, "repeats must be a whole number"),
        ({"per_task": "many"}, "per_task must be a whole number"),
        ({"sampling": {"beams": 4}}, "unknown key 'beams'"),
        ({"title": 3}, "title must be text"),
    ],
)
def test_a_wrong_entry_is_an_error_that_names_file_and_key(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SaccadeError, match=message) as caught:
        suite(**changes)
    assert str(caught.value).startswith("small.toml")


def test_a_method_takes_options_and_a_label_of_its_own() -> None:
    found = suite(methods=["plain", {"name": "chain", "gamma": 3}, {"name": "chain", "label": "long", "gamma": 9}])
    assert [(m.label, m.options) for m in found.methods] == [
        ("plain", {}),
        ("chain-3", {"gamma": 3}),
        ("long", {"gamma": 9}),
    ]


def test_an_unreadable_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("tasks = [")
    for name, message in (
        (str(tmp_path / "a.toml"), "is not valid TOML"),
        (str(tmp_path / "gone.toml"), "Cannot read the suite .*No such file"),
        ("quack", r"There is no suite 'quack' \(did you mean quick\?\); expected one of quick, forms"),
    ):
        with pytest.raises(SaccadeError, match=message):
            suites.load(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["warp"]}, "Unknown method 'warp'; expected one of plain, chain"),
        ({"methods": [{"name": "chain", "beta": 3}]}, "Method chain has no option beta; its options are: draft_with"),
        ({"methods": [{"name": "chain", "gamma": 0}]}, "gamma of method chain must be at least 1"),
        ({"tasks": ["opera"]}, "There is no pocket task 'opera'"),
        ({"tasks": [{"task": "scene", "grammar": "rhyme"}]}, "has no grammar 'rhyme'"),
        (
            {"tasks": [{"task": "scene", "schema": {"pattern": 3}}]},
            "cannot run task scene: llguidance rejects the grammar",
        ),
        ({"tasks": [{"task": "scene", "lark": "begin: /a/"}]}, "cannot run task scene: llguidance"),
        ({"tasks": [{"task": "scene", "prompt": "{word}"}]}, "the prompt names {word}, but the item has question"),
        ({"tasks": [{"task": "opera", "optional": True}]}, "has no usable task: There is no pocket task 'opera'"),
    ],
)
def test_what_is_not_there_is_an_error_unless_it_is_optional(
    vlm: saccade.VLM, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SaccadeError, match=message):
        prepare(suite(**changes), vlm)


def test_a_task_that_the_model_cannot_see_or_hold_is_left_out_or_an_error(
    vlm: saccade.VLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, context = type(vlm.processor).prompt, vlm.target.traits.limits.context
    assert context is not None
    videos = [InputError("The model takes images but no videos."), context + 1]

    def made(self: InputProcessor, messages: list[dict[str, list[dict[str, str]]]], **_: Any) -> Prompt:
        if not any(part["type"] == "video" for message in messages for part in message["content"]):
            return prompt(self, messages)
        problem = videos[0]
        if isinstance(problem, InputError):
            raise problem
        return Prompt(tuple([20] * problem))

    monkeypatch.setattr(type(vlm.processor), "prompt", made)
    with pytest.raises(SaccadeError, match=r"This model cannot run task video: .*no videos"):
        prepare(suite(tasks=["video"]), vlm)
    for words in ("takes images but no videos", f"The sequence needs {context + 1} tokens but this model's"):
        prepared = prepare(suite(tasks=["scene", {"task": "video", "optional": True}]), vlm)
        assert words in prepared.missing[0]
        assert list(prepared.questions) == ["scene"]
        videos.pop(0)


def test_equal_seeds_ask_the_same_and_others_something_else(vlm: saccade.VLM) -> None:
    first, again, other = (prepare(suite(seed=s), vlm).config()["prompts"] for s in (1, 1, 2))
    assert first == again != other


def test_a_number_of_prompts_given_by_hand_is_that_of_every_task() -> None:
    name = str(catalogue.SUITES / "lvspec-figure-7.toml")
    suite = SuiteOptions(suite=name, tasks="scene,prose").chosen(SizeOptions(per_task=5), DataOptions())
    assert [task.count or suite.per_task for task in suite.tasks] == [5, 5]
    alone = SuiteOptions(suite=name, tasks="prose").chosen(SizeOptions(), DataOptions())
    assert alone.tasks[0].count == 40


@pytest.mark.parametrize("source", ["task", "file"])
def test_a_longest_answer_of_a_task_holds_unless_one_is_given_by_hand(tmp_path: Path, source: str) -> None:
    (tmp_path / "mine.jsonl").write_text('{"messages": [{"role": "user", "content": "Say one."}]}')
    place = {"task": "scene", "file": str(tmp_path / "mine.jsonl")}[source]
    tasks = f"""[{{ name = "mine", {source} = "{place}", max_new_tokens = 5 }}, "chart"]"""
    file = tmp_path / "suite.toml"
    file.write_text(f'title = "x"\nmax_new_tokens = 12\nper_task = 1\ntasks = {tasks}\nmethods = ["plain"]\n')
    for sizes, expected in ((SizeOptions(), [5, 12]), (SizeOptions(max_new_tokens=3), [3, 3])):
        chosen = SuiteOptions(suite=str(file)).chosen(sizes, DataOptions())
        groups, _ = gather(chosen)
        longest = {"max_new_tokens": chosen.max_new_tokens}
        assert [group[0].options(longest)["max_new_tokens"] for group in groups.values()] == expected


def test_methods_take_options_behind_colons() -> None:
    suite = suites.choose_methods(suites.load("quick"), ["sage:total=25:keep_images=0.5", "chain"])
    assert suite.methods[1].options["total"] == 25
    assert suite.methods[1].label == "sage:total=25:keep_images=0.5"
    of_label = suites.choose_methods(suites.load("heads"), ["HiViS:top=4"]).methods[1]
    assert of_label.name == "hivis"
    assert (of_label.options["total"], of_label.options["top"]) == (25, 4)
    labelled = suites.choose_methods(suite, ["small=sage:total=25"]).methods[1]
    assert (labelled.label, labelled.name, labelled.options["total"]) == ("small", "sage", 25)
    assert suites.choose_methods(suite, ["plainest=chain"]).methods[1].label == "plainest"
    for name in ("a", "plain"):
        with pytest.raises(SaccadeError, match=f"Two methods have the label '{name}'"):
            suites.choose_methods(suite, [f"{name}=sage", f"{name}=chain"])
    with pytest.raises(SaccadeError, match="expected NAME=VALUE"):
        suites.choose_methods(suite, ["sage:total"])
