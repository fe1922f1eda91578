"""Two runs, or one run's methods, side by side: noise is no difference, a planted slowdown is one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from fake_runs import make_run, write_run
from test_bench_metrics import record as timed
from typer.testing import CliRunner

from checkpoints import vlm
from saccade.bench.compare import Comparison, compare, compare_methods
from saccade.bench.records import RecordedRun
from saccade.bench.suites import MethodEntry
from saccade.cli import bench as command
from saccade.cli.option_groups import spread
from saccade.errors import SaccadeError
from saccade.model_spec import ModelSpec

SOME = ["plain", "chain", "dynamic-tree", "lvspec"]

app = typer.Typer()
app.command("compare")(spread(command.compare))
app.callback()(lambda: None)


@pytest.fixture(scope="module")
def pairs() -> list[tuple[RecordedRun, RecordedRun]]:
    """Twenty pairs of runs of one configuration, each run with noise and a drift of its own."""
    return [tuple(make_run(seed=2 * i + j, methods=SOME, repeats=1) for j in (0, 1)) for i in range(20)]


def verdicts(found: Comparison) -> dict[str, str]:
    return {change.method: change.verdict for change in found.changes}


@pytest.mark.parametrize("relative", [True, False])
def test_two_runs_of_one_configuration_do_not_differ_in_19_of_20(
    pairs: list[tuple[RecordedRun, RecordedRun]], relative: bool
) -> None:
    found = [verdicts(compare(a, b, relative=relative)) for a, b in pairs]
    assert sum(set(v.values()) <= {"no difference", "yardstick"} for v in found) >= 19


def test_a_machine_that_is_slower_as_a_whole_makes_no_method_slower() -> None:
    every = dict.fromkeys(["plain", "chain", "dynamic-tree", "prompt-lookup", "lvspec", "fly"], 1.3)
    a, b = make_run(seed=1), make_run(seed=2, slower=every)
    assert set(verdicts(compare(a, b)).values()) == {"no difference", "yardstick"}
    assert set(verdicts(compare(a, b, relative=False)).values()) == {"slower"}


def test_an_answer_is_compared_with_plain_decoding_s_of_the_same_repeat() -> None:
    """The whole machine is at half its speed in the second repeat."""
    a = make_run(methods=["plain", "chain"], repeats=2)
    records = []
    for record in a.records:
        seconds = {name: spent * (1 + record.repeat) for name, spent in record.stats["seconds"].items()}
        records.append(replace(record, stats={**record.stats, "seconds": seconds}))
    (change,) = (each for each in compare(a, replace(a, records=records)).changes if each.method == "chain")
    assert change.relative is not None
    assert change.relative.value == pytest.approx(1)
    assert change.verdict == "no difference"


@pytest.mark.parametrize("relative", [True, False])
def test_a_planted_slowdown_of_10_percent_is_found_and_only_there(relative: bool) -> None:
    found = []
    for seed in range(3):
        a = make_run(seed=seed, prompts=24, methods=SOME)
        b = make_run(seed=100 + seed, prompts=24, methods=SOME, slower={"chain": 1.1, "lvspec": 1 / 1.1})
        found.append(verdicts(compare(a, b, relative=relative)))
    assert [v["chain"] for v in found] == ["slower"] * 3
    assert [v["lvspec"] for v in found] == ["faster"] * 3
    assert {v["dynamic-tree"] for v in found} == {"no difference"}


def test_prompts_that_one_run_lacks_are_not_compared() -> None:
    found = compare(make_run(seed=1), make_run(seed=2, first_prompt=100))
    assert {(change.prompts, change.answers) for change in found.changes} == {(0, 0)}
    assert set(verdicts(found).values()) == {"too few prompts", "yardstick"}
    changed = compare(make_run(seed=1), make_run(seed=2, hostile=True))  # a prompt with other words is another one
    assert {change.prompts for change in changed.changes} == {11}


def test_a_few_prompts_are_too_few_for_a_verdict() -> None:
    a, b = make_run(seed=1, prompts=3), make_run(seed=2, prompts=3, slower={"chain": 2.0})
    found = compare(a, b)
    assert verdicts(found)["chain"] == "too few prompts"
    assert found.fewest == 8  # 2 * 0.5 ** 8 < (1 - 0.95) / 5 methods: eight heads in a row would be no accident


def test_settings_methods_and_tokens_that_differ_are_named() -> None:
    a, b = make_run(seed=1), make_run(seed=1, methods=["plain", "chain"])
    b.header.environment["torch"] = "2.14.0"
    b.records[-1].tokens[3] += 1
    found = compare(a, b)
    assert ("torch", "2.13.0", "2.14.0") in found.settings
    assert found.only == {"A": ["dynamic-tree", "prompt-lookup", "lvspec", "fly"], "B": []}
    assert [(c.equal, c.answers) for c in found.changes] == [(36, 36), (35, 36)]


def test_methods_of_a_run_are_level_until_their_prompts_tell_them_apart() -> None:
    near = twins(1.0)
    found = compare_methods(near)
    assert [change.method for change in found.changes] == ["chain", "twin", "plain"]  # fastest first
    assert verdicts(found) == {"chain": "yardstick", "twin": "no difference", "plain": "slower"}
    assert found.undecided == ["twin"]
    assert verdicts(compare_methods(twins(1.1)))["twin"] == "slower"
    assert verdicts(compare_methods(near, "plain")) == {"chain": "faster", "twin": "faster", "plain": "yardstick"}


def test_a_lossy_method_is_no_yardstick_and_few_prompts_decide_nothing() -> None:
    found = compare_methods(make_run(methods=["plain", "chain", "lvspec"], slower={"lvspec": 0.5}))
    assert verdicts(found) == {"lvspec": "faster", "chain": "yardstick", "plain": "slower"}
    assert compare_methods(make_run(prompts=4, methods=["plain", "chain"])).undecided == ["plain"]


def twins(factor: float) -> RecordedRun:
    """A run with `twin`, which takes as long as `chain` on every prompt, times a factor."""
    run = make_run(methods=["plain", "chain"])
    for record in [record for record in run.records if record.method == "chain"]:
        seconds = {name: spent * factor for name, spent in record.stats["seconds"].items()}
        run.records.append(replace(record, method="twin", stats={**record.stats, "seconds": seconds}))
    return run


@pytest.mark.parametrize(
    ("seconds", "method", "options", "level"),
    [
        ((1.4, 1.0), "chain", {"gamma": 8}, None),
        ((1.0, 1.01), "chain", {"gamma": 3}, "chain-8"),
        ((1.98, 3.0), "plain", {}, "chain-3"),
    ],
)
def test_the_fastest_wins_plain_decoding_where_none_is_faster_and_level_ones_are_named(
    seconds: tuple[float, float], method: str, options: dict[str, int], level: str | None
) -> None:
    model = vlm("llava", "llava-draft")
    entries = [MethodEntry("plain", "plain"), *(MethodEntry("chain", f"chain-{n}", {"gamma": n}) for n in (3, 8))]
    methods = {entry.label: model.using(entry.name, **entry.options) for entry in entries}
    prepared: Any = SimpleNamespace(methods=methods, suite=SimpleNamespace(methods=entries))
    times = zip(methods, (2.0, *seconds), strict=True)
    records = [timed(str(prompt), label, spent) for label, spent in times for prompt in range(12)]
    run: Any = SimpleNamespace(records=records, header=SimpleNamespace(environment={"threads": 1}))
    chosen, measured = command.choose(prepared, run, ModelSpec("T", heads={"a": "b"}))
    assert (chosen.method, chosen.options, chosen.heads) == (method, options, {"a": "b"})
    assert measured.get("level_with") == level


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    settings: dict[str, Any] = {"methods": ["plain", "chain"], "prompts": 8, "noise": 0.01}
    write_run(folder / "a", seed=1, **settings)
    write_run(folder / "b", seed=2, slower={"chain": 1.2}, **settings)
    return folder / "a", folder / "b"


def test_the_command_says_it_in_words_and_as_json_and_fails_on_request(folders: tuple[Path, Path]) -> None:
    a, b = map(str, folders)
    run = CliRunner()
    shown = run.invoke(app, ["compare", a, b])
    assert shown.exit_code == 0
    assert "8 prompts, each compared with itself." in shown.stdout
    assert run.invoke(app, ["compare", a, b, "--fail-if-slower"]).exit_code == 1
    assert run.invoke(app, ["compare", b, a, "--fail-if-slower"]).exit_code == 0
    found = json.loads(run.invoke(app, ["compare", a, b, "--json"]).stdout)
    assert found["slower"] == ["chain"]
    assert found["changes"][1]["relative"]["low"] > 1.02


def test_the_command_compares_the_methods_of_one_run(folders: tuple[Path, Path]) -> None:
    folder, run = str(folders[0]), CliRunner()
    said = run.invoke(app, ["compare", folder]).stdout
    assert re.search(r"^plain +slower +1.[5-9]", said, re.MULTILINE)
    assert "the fastest method is among those not slower with 95% confidence" in " ".join(said.split())
    found = json.loads(run.invoke(app, ["compare", folder, "--json", "--against", "plain"]).stdout)
    assert (found["against"], found["slower"], found["undecided"]) == ("plain", [], [])
    for words, why in (
        (["--against", "chian"], "has no method 'chian' (did you mean chain?)"),
        (["--fail-if-slower"], "are for two runs"),
        ([folder, "--against", "plain"], "--against is for the methods of one run"),
    ):
        assert why in str(run.invoke(app, ["compare", folder, *words]).exception)


def test_runs_without_a_common_method_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "a", methods=["plain"], prompts=1)
    write_run(tmp_path / "b", methods=["chain"], prompts=1)
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert isinstance(result.exception, SaccadeError)
    assert "no method in common" in str(result.exception)
