"""Suites: built-in ones are sound, and files of the user are read strictly."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bench_kit import suite

import saccade
from saccade.bench import library
from saccade.bench.preparing import prepare
from saccade.bench.questions import gather
from saccade.bench.suite import BASELINE, MethodEntry, parse
from saccade.cli.bench import choose_suite
from saccade.cli.data_options import DataOptions, tasks_of
from saccade.errors import InputError, SaccadeError
from saccade.inputs.processor import InputProcessor
from saccade.inputs.prompt import Prompt

MIRRORED = [
    "quick",
    "dream-1",
    "dream-1-sampling",
    "dream-2",
    "dream-3",
    "dream-figure-4",
    "dream-figure-4b",
    "dream-figure-4d",
    "heads",
    "heads-long",
    "hivis-1",
    "hivis-2",
    "hivis-2-sampling",
    "hivis-3",
    "hivis-4",
    "hivis-5",
    "hivis-5-sampling",
    "hivis-figure-6",
    "hivis-figure-7",
    *(f"lvspec-{n}" for n in (1, 2, 3, 5, 6, 8, "entropy", "figure-7", "figure-9", "figure-10")),
    *(f"sage-{n}" for n in (1, 3, 4, 5, 6, "figure-2", "figure-3")),
    "small-trees",
    *(f"tabed-{n}" for n in (*range(1, 11), "figure-3", "figure-4")),
]
"""Suites that docs/results has pages of."""
OF_NO_PAPER = ("heads-long", "lvspec-entropy", "quick", "small-trees")


def test_every_paper_has_its_suites_in_reading_order() -> None:
    assert library.names() == [*MIRRORED, "tune"]


@pytest.mark.parametrize("name", MIRRORED)
def test_a_built_in_suite_is_read_and_says_what_it_mirrors(name: str) -> None:
    found = library.load(name)
    assert found.methods[0].name == BASELINE
    assert len(found.methods) > 1
    assert found.title
    assert (name in OF_NO_PAPER) == (not found.mirrors)
    assert all(m.optional or m.name in saccade.methods.METHODS for m in found.methods)


FEW = ("quick", "dream-1-sampling", "heads", "hivis-3", "lvspec-figure-9", "sage-5", "tabed-8")
"""Suites of every paper, which the fast tests prepare."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FEW else [pytest.mark.slow]) for n in MIRRORED if n != "sage-4"]
)
def test_what_a_built_in_suite_lacks_is_listed_and_the_rest_is_ready(name: str, vlm: saccade.VLM) -> None:
    found = library.load(name).with_(per_task=1)
    prepared = prepare(found, vlm)
    left_out = len(found.methods) - len(prepared.methods)
    assert sum(reason.startswith("Method ") for reason in prepared.missing) == left_out
    assert set(prepared.methods) <= {m.label for m in found.methods}
    assert prepared.questions


def test_an_unknown_suite_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SaccadeError, match="There is no suite 'quack'; expected one of quick, dream-1"):
        library.load("quack")


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


def test_toml_and_yaml_say_the_same(tmp_path: Path) -> None:
    toml, yaml = tmp_path / "mine.toml", tmp_path / "mine.yaml"
    toml.write_text('tasks = ["scene"]\nmethods = [{name = "chain", gamma = 3}]\nsampling = {temperature = 0.7}\n')
    yaml.write_text("tasks: [scene]\nmethods:\n  - name: chain\n    gamma: 3\nsampling: {temperature: 0.7}\n")
    assert library.load(str(toml)) == library.load(str(yaml))
    assert library.load(str(toml)).name == "mine"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "tasks = [", "is not valid TOML"),
        ("a.yaml", "tasks: [", "is not valid YAML"),
        ("a.yaml", "- scene", "holds no table"),
        ("a.toml", "", "tasks is missing or empty"),
        ("gone.toml", None, "Cannot read the suite .*No such file"),
    ],
)
def test_an_unreadable_file_is_one_sentence(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SaccadeError, match=message):
        library.load(str(tmp_path / name))


def test_methods_can_be_chosen_by_label_or_by_name() -> None:
    found = library.choose_methods(library.load("tabed-1"), ["M", "prompt-lookup"])
    assert [(m.label, m.name) for m in found.methods] == [
        ("plain", "plain"),
        ("M", "chain"),
        ("prompt-lookup", "prompt-lookup"),
    ]


def test_the_label_of_plain_decoding_is_not_for_another_method() -> None:
    with pytest.raises(SaccadeError, match="Two methods have the label 'plain'"):
        library.choose_methods(library.load("quick"), ["plain=chain"])


def test_an_unknown_method_or_option_that_is_not_optional_is_an_error(vlm: saccade.VLM) -> None:
    with pytest.raises(SaccadeError, match="There is no method 'warp'; there are plain, chain"):
        prepare(suite(methods=["warp"]), vlm)
    with pytest.raises(SaccadeError, match="Method chain has no option beta; its options are: draft_with, tree, gamma"):
        prepare(suite(methods=[{"name": "chain", "beta": 3}]), vlm)
    with pytest.raises(SaccadeError, match="gamma of method chain must be at least 1"):
        prepare(suite(methods=[{"name": "chain", "gamma": 0}]), vlm)


def test_an_unknown_task_or_grammar_is_an_error(vlm: saccade.VLM) -> None:
    with pytest.raises(SaccadeError, match="There is no pocket task 'opera'"):
        prepare(suite(tasks=["opera"]), vlm)
    with pytest.raises(SaccadeError, match="has no grammar 'rhyme'"):
        prepare(suite(tasks=[{"task": "scene", "grammar": "rhyme"}]), vlm)


def test_a_suite_of_which_nothing_is_left_says_so(vlm: saccade.VLM) -> None:
    with pytest.raises(SaccadeError, match="has no usable task: There is no pocket task 'opera'"):
        prepare(suite(tasks=[{"task": "opera", "optional": True}]), vlm)


def test_a_task_that_the_model_cannot_see_is_left_out_or_an_error(
    vlm: saccade.VLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = type(vlm.processor).prompt

    def still(self: InputProcessor, messages: list[dict[str, list[dict[str, str]]]]) -> Prompt:
        if any(part["type"] == "video" for message in messages for part in message["content"]):
            raise InputError("The model takes images but no videos.")
        return prompt(self, messages)

    monkeypatch.setattr(type(vlm.processor), "prompt", still)
    prepared = prepare(suite(tasks=["scene", {"task": "video", "optional": True}]), vlm)
    assert "takes images but no videos" in prepared.missing[0]
    with pytest.raises(SaccadeError, match=r"This model cannot run task video: .*no videos"):
        prepare(suite(tasks=["video"]), vlm)


def test_a_task_whose_prompts_are_longer_than_the_context_is_left_out(
    vlm: saccade.VLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = vlm.target.traits.context
    assert context is not None
    lengths = iter((100, 100, 100, context + 1))

    def measured(self: InputProcessor, messages: list[dict[str, list[dict[str, str]]]]) -> Prompt:
        return Prompt(tuple([20] * next(lengths)))

    monkeypatch.setattr(type(vlm.processor), "prompt", measured)
    prepared = prepare(suite(tasks=["scene", {"task": "chart", "optional": True}]), vlm)
    assert f"Task chart: The sequence needs {context + 1} tokens but this model's" in prepared.missing[0]
    assert list(prepared.questions) == ["scene"]


def test_more_turns_than_there_are_is_listed(vlm: saccade.VLM) -> None:
    assert "Task scene, turn 2: its conversations are shorter." in prepare(suite(turns=2), vlm).missing


def test_equal_seeds_ask_the_same_and_others_something_else(vlm: saccade.VLM) -> None:
    first, again, other = (prepare(suite(seed=s), vlm).config()["prompts"] for s in (1, 1, 2))
    assert first == again != other


def test_a_number_of_prompts_given_by_hand_is_that_of_every_task() -> None:
    suite = choose_suite("lvspec-figure-7", None, "scene,prose", None, {"per_task": 5})
    assert [task.count or suite.per_task for task in suite.tasks] == [5, 5]
    assert choose_suite("lvspec-figure-7", None, "prose", None, {}).tasks[0].count == 24


@pytest.mark.parametrize("source", ["task", "file"])
def test_a_longest_answer_of_a_task_holds_unless_one_is_given_by_hand(tmp_path: Path, source: str) -> None:
    (tmp_path / "mine.jsonl").write_text('{"messages": [{"role": "user", "content": "Say one."}]}')
    place = {"task": "scene", "file": str(tmp_path / "mine.jsonl")}[source]
    found = suite(tasks=[{"name": "mine", source: place, "max_new_tokens": 5}, "chart"])
    for given, expected in (({}, [5, 12]), ({"max_new_tokens": 3}, [3, 3])):
        tasks = tasks_of(found.tasks, (), DataOptions(), given)
        chosen = found.with_(**given, tasks=tasks)
        groups, _ = gather(chosen)
        longest = {"max_new_tokens": chosen.max_new_tokens}
        assert [group[0].options(longest)["max_new_tokens"] for group in groups.values()] == expected


def test_parse_needs_no_title() -> None:
    assert parse({"tasks": ["scene"], "methods": ["chain"]}, "mine", "mine.toml").title == "mine"


def tree_of(method: MethodEntry) -> dict[str, Any]:
    """Resolved options of a row."""
    return saccade.methods.options(method.name, method.options)


def depth_and_nodes(options: dict[str, Any]) -> tuple[int, int] | None:
    """Levels and nodes of a tree; None for chains and methods without a drafter's tree."""
    if options.get("tree") == "static":
        return 5, 25
    if options.get("tree") in ("dynamic", "sage"):
        return options.get("max_depth", options.get("ceiling")), options["total"]
    if options.get("tree") == "width":
        return options["max_depth"], options["width"] * options["max_depth"]
    if options.get("tree") == "branches":
        return options["gamma"], options["branches"] * options["gamma"]
    return None


def drafter_of(method: MethodEntry, options: dict[str, Any]) -> tuple[Any, ...]:
    """What guesses: a head by name, or the draft model with its views."""
    if options["draft_with"] == "model":
        return "model", options["views"].replace("M", "") if options["views"] == "M" else options["views"]
    return options["draft_with"], method.head


@pytest.mark.parametrize("name", MIRRORED)
def test_beside_every_tree_is_a_chain_as_deep_by_the_same_drafter(name: str) -> None:
    rows = [(m, tree_of(m)) for m in library.load(name).methods if m.name != BASELINE]
    chains = {
        (drafter_of(m, o), o["gamma"]) for m, o in rows if o.get("tree") in ("chain", "confident") and "gamma" in o
    }
    for method, options in rows:
        shape = depth_and_nodes(options)
        assert shape is None or (drafter_of(method, options), shape[0]) in chains, method.label


UNEQUAL = {
    ("sage-1", "SAGE"): "64 nodes in the paper, whose other trees have 25; SAGE-25 stands beside it",
    ("sage-3", "SAGE"): "likewise",
    ("sage-6", "SAGE"): "likewise",
    ("sage-figure-3", "SAGE"): "likewise",
}
"""Suite and label of trees that are compared with smaller ones, with the reason."""


@pytest.mark.parametrize("name", MIRRORED)
def test_trees_that_are_compared_have_equally_many_nodes(name: str) -> None:
    found = library.load(name)
    nodes = {m.label: shape[1] for m in found.methods if (shape := depth_and_nodes(tree_of(m)))}
    for claim in found.claims:
        for above, below in pairwise(claim.order):
            sizes = {nodes[label] for label in (*above, *below) if label in nodes and (name, label) not in UNEQUAL}
            assert len(sizes) <= 1, (name, above, below)


@pytest.mark.parametrize("name", [n for n in MIRRORED if n not in OF_NO_PAPER])
def test_every_suite_of_a_paper_says_what_the_paper_found(name: str) -> None:
    assert library.load(name).claims


def test_figure_6_has_a_chain_as_deep_as_every_tree_and_equal_nodes() -> None:
    rows = [m for m in library.load("hivis-figure-6").methods if m.name == "hivis"]
    trees = {(m.head, m.options["max_depth"]): m.options["total"] for m in rows if "max_depth" in m.options}
    chains = {(m.head, m.options["gamma"]) for m in rows if m.options.get("tree") == "chain"}
    assert trees.keys() == chains
    assert set(trees.values()) == {60}
    assert {depth for _, depth in trees} == set(range(6, 11))
    assert {head for head, _ in trees} == {"hivis", "no-stage-2", "no-stage-2-no-residuals"}
