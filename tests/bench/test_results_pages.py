"""`python -m tools.results`: many suites on one revision, resumed after any stop, never mixed, published as a whole."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import typer
from bench_kit import wrong

import tools.heads.__main__ as heads_main
import tools.results.__main__ as results_main
from saccade.bench.records import FILE, RecordedRun
from saccade.bench.report.tables import escape
from saccade.bench.runner import Runner
from saccade.errors import InputError, SaccadeError
from saccade.pocket import head_paths
from tools import SETTINGS
from tools.heads.catalogue import read as read_recipes
from tools.heads.workshop import MARK as HEAD_MARK
from tools.results import kept
from tools.results.catalogue import Measurement, measurements, suite_names
from tools.results.claims import WORST_FIRST
from tools.results.measure import MARK, Report, Session, Setup
from tools.results.numbers import by_hand
from tools.results.pages import COLUMNS, INDEX, REASONS, publish, reasons

NAMES = ("quick", "lvspec-2")
RESULTS = Path(__file__).parents[2] / "docs" / "results"
LINES: list[str] = []


@pytest.fixture
def setup(pair: tuple[str, str], tmp_path: Path) -> Setup:
    return Setup(*pair, models=tmp_path / "models", out=tmp_path / "out", dtype="float32", short=True)


@pytest.fixture(scope="module")
def measured(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run in which everything has been measured."""
    folder = tmp_path_factory.mktemp("measured")
    run(Setup(*pair, models=folder / "models", out=folder / "out", dtype="float32", short=True))
    return folder / "out"


@pytest.fixture
def over(setup: Setup, measured: Path) -> Setup:
    """A run that goes on with all measured before."""
    shutil.copytree(measured, setup.out)
    return setup


def run(setup: Setup, names: tuple[str, ...] = NAMES) -> tuple[Session, Report]:
    LINES.clear()
    session = Session(setup, LINES.append)
    return session, session.run([m.short() for m in measurements(names)])


def published(records: Path, docs: Path, names: tuple[str, ...] = NAMES) -> dict[str, str]:
    publish(records, docs, measurements(names), LINES.append)
    return {path.name: path.read_text(encoding="utf-8") for path in docs.iterdir() if path.is_file()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_pages_open_with_the_verdicts_and_the_index_lists_them_by_paper(over: Setup, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "of-an-earlier-revision.md").write_text("old")
    session, report = run(over)
    assert report.measured == list(NAMES)
    assert not report.failed
    pages = published(session.records, docs, (*NAMES, "tabed-1"))
    assert pages.keys() == {INDEX, *(f"{name}.{kind}" for name in NAMES for kind in ("md", "csv"))}, "nothing old stays"
    title, _, verdict, *_ = pages["lvspec-2.md"].splitlines()
    assert title.startswith("# lvspec-2: ")
    assert verdict.startswith("Position shifts accept more: undecided, ")
    assert "(LVSpec / LVSpec-no-PST, 2 prompts); with them 97 % of the score is kept: not measured" in verdict
    revision = json.loads((over.out / MARK).read_text())["environment"]["revision"]
    for text in (pages[INDEX], pages["quick.md"]):
        assert f"revision {revision}" in text
        assert "bfloat16 instructions, 1 thread;" in text
    command = "`python -m tools.results quick -t TARGET -d DRAFT --short`"
    assert f"{command}: 2 prompts, at most 16 tokens;" in pages["quick.md"]
    papers, others = pages[INDEX].split("## Others")
    assert "## LVSpec" in papers
    assert "| [Table 2](lvspec-2.md): position shifts accept more | 7.76, 7.27 | " in papers
    assert "## LVSpec\n\nholds 0, level 0, undecided 1, does not 0.\n" in papers
    assert "| undecided (40) | |" in papers.replace("  ", " "), "2 prompts, so that 40 are the fewest"
    assert "| [quick](quick.md): The fastest row is " in others
    assert "Not measured: tabed-1; `python -m tools.results NAME`" in others
    assert str(tmp_path) not in "".join(pages.values()), "no folder of this machine"


def test_a_page_has_one_short_table_and_its_file_every_number(measured: Path, tmp_path: Path) -> None:
    pages = published(measured / kept.FOLDER, tmp_path / "docs")
    for name in NAMES:
        rows = [line.strip("| ").split(" | ") for line in pages[f"{name}.md"].splitlines() if line.startswith("|")]
        assert sum(row[0] == "method" for row in rows) == 1
        assert len(rows[0]) == len(rows[2]) <= len(COLUMNS) == 6
        numbers = list(csv.DictReader(io.StringIO(pages[f"{name}.csv"])))
        plain = {row["quantity"] for row in numbers if (row["method"], row["task"]) == ("plain", "scene")}
        assert {"tokens/s", "block efficiency", "verified/token"} <= plain, "also by task"
        assert {"comparison", "milliseconds by stage", "step times"} <= {row["section"] for row in numbers}
    claim = next(row for row in numbers if row["section"] == "claim: position shifts accept more")
    assert claim["method"] == "LVSpec / LVSpec-no-PST"
    assert f"{claim['value']} \\[{claim['low']}, {claim['high']}\\]" in pages["lvspec-2.md"]


def test_kept_records_render_the_same_bytes_anywhere(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = tmp_path / "docs"
    published(measured / kept.FOLDER, docs)
    before = contents(docs)
    assert {f"records/{name}.jsonl.xz" for name in NAMES} <= before.keys()
    monkeypatch.setattr("saccade.environment.revision", lambda: "0123456789ab+")
    monkeypatch.setattr("saccade.cpu.has_instructions", lambda dtype: pytest.fail("asks the machine that renders"))
    publish(docs / kept.FOLDER, docs, measurements(NAMES), LINES.append)
    assert contents(docs) == before
    found = kept.read(kept.path_of(docs / kept.FOLDER, "quick"))
    kept.keep(tmp_path / "again.xz", found, found.header.places)
    assert (tmp_path / "again.xz").read_bytes() == before["records/quick.jsonl.xz"]
    assert not any(record.question or record.text or record.tokens for record in found.records)
    with pytest.raises(SaccadeError, match="holds no records of pages"):
        publish(tmp_path / "nothing", docs, measurements(NAMES), LINES.append)


@pytest.mark.slow
def test_the_published_pages_are_what_their_kept_records_render(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path / "docs")
    publish(tmp_path / "docs" / kept.FOLDER, tmp_path / "docs", measurements(), LINES.append)
    assert contents(tmp_path / "docs") == contents(RESULTS)


def test_a_reason_stands_where_it_explains_and_nowhere_else(over: Setup, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    session, _ = run(over, ("lvspec-2",))
    covers = '{ lvspec-2 = ["position shifts accept more"], tabed-1 = ["other"] }'
    for verdict, is_shown in (("undecided", True), ("does not", False)):
        why = 'cause = "the moon\\nis full"\nshown = "Look up."'
        (docs / REASONS).write_text(f'[[reason]]\nverdicts = ["level", "{verdict}"]\n{why}\ncovers = {covers}\n')
        LINES.clear()
        pages = published(session.records, docs, ("lvspec-2",))
        paragraph = "**Why**: the moon is full. Look up."
        assert (pages["lvspec-2.md"].split("\n\n")[2] == paragraph) == is_shown
        row, other, _ = (line for line in pages[INDEX].splitlines() if "(lvspec-2.md): " in line)
        assert row.endswith("| [the moon is full](lvspec-2.md) |") == is_shown
        assert other.endswith("| not measured |  |"), "a claim that it does not cover"
        assert any("'position shifts accept more', is left out" in line for line in LINES) != is_shown
        assert REASONS in pages, "it outlasts the pages"
    (docs / REASONS).write_text("[[reason]]\nbecause = 1\n")
    with pytest.raises(SaccadeError, match=r"reasons\.toml, reason 1: unknown key 'because'"):
        published(session.records, docs, ("lvspec-2",))


def test_a_reason_has_the_numbers_of_the_pages_that_it_cites(over: Setup, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    session, _ = run(over, ("lvspec-2",))

    def written(shown: str) -> str:
        covers = '{ lvspec-2 = ["position shifts accept more"] }'
        text = f'[[reason]]\nverdicts = ["undecided"]\ncause = "so"\nshown = "{shown}"\ncovers = {covers}\n'
        (docs / REASONS).write_text(text)
        LINES.clear()
        return published(session.records, docs, ("lvspec-2",))["lvspec-2.md"]

    claim = written("{lvspec-2: position shifts accept more}, {lvspec-2: LVSpec | block efficiency}.")
    ratio, tokens = re.search(r"Why\*\*: so\. (.*), (.*)\.\n", claim).groups()  # type: ignore[union-attr]
    assert f"undecided, {escape(ratio)} (LVSpec / LVSpec-no-PST" in claim
    assert f"| LVSpec (lossy) | {tokens} " in claim
    assert "**Why**" not in written("{tabed-1: M | block efficiency}")
    assert "is left out, for tabed-1 is not measured" in LINES[-1]
    with pytest.raises(SaccadeError, match=r"no number \{lvspec-2: LVSpec | speed\}; cite one of"):
        written("{lvspec-2: LVSpec | speed}")


def test_every_number_of_a_reason_is_cited() -> None:
    for reason in reasons(RESULTS):
        assert not by_hand(reason.cause), reason.cause
        assert not by_hand(reason.shown), reason.cause
    assert by_hand("3 % of 1.05 are 4 times {quick: plain | speed-up} or 320 steps") == ["3 %", "1.05", "4 times"]


def test_every_reason_covers_claims_that_there_are() -> None:
    claims = {m.name: {claim["says"] for claim in m.suite.claims} for m in measurements()}
    for reason in reasons(RESULTS):
        assert set(reason.verdicts) <= {*WORST_FIRST}
        for page, says in reason.covers.items():
            assert set(says) <= claims[page], page


def test_a_figure_s_page_has_its_most_telling_drawing(setup: Setup, tmp_path: Path) -> None:
    names = ("tabed-figure-3",)
    session, (measurement,) = Session(setup, LINES.append), measurements(names)
    small = measurement.short().suite
    small = small.with_(trace=1, tasks=small.tasks[:1], methods=(small.methods[0], *small.methods[-2:]))
    assert session.run([replace(measurement, suite=small)]).measured
    pages = published(session.records, tmp_path / "docs", names)
    assert re.findall(r"!\[.*\]\(.*\)", pages["tabed-figure-3.md"]) == ["![Weights of the views](tabed-figure-3.svg)"]
    assert pages["tabed-figure-3.svg"].startswith('<svg xmlns="http://www.w3.org/2000/svg" ')
    assert "\nweight of the first view,scene,TABED-MT,1/5," in pages["tabed-figure-3.csv"]


def test_a_stopped_run_resumes_without_repeating_an_answer(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        lines = (setup.out / "quick" / FILE).read_text().splitlines() if (setup.out / "quick" / FILE).exists() else []
        if len(lines) == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_report", stop)
        with pytest.raises(KeyboardInterrupt):
            run(setup, ("quick",))
    first = (setup.out / "quick" / FILE).read_text()
    assert len(first.splitlines()) == 6
    _, report = run(setup, ("quick",))
    assert report.measured == ["quick"]
    assert (setup.out / "quick" / FILE).read_text().startswith(first)


def test_what_is_measured_is_not_measured_again_nor_for_other_prompts(
    over: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "run", lambda self: pytest.fail("measured again"))
    session, report = run(over)
    assert report.measured == list(NAMES)
    assert "[1/2] quick: measured before" in LINES

    def of(tasks: int, per_task: int) -> list[Measurement]:
        return [
            replace(m, suite=m.suite.with_(tasks=m.suite.tasks[:tasks], per_task=per_task))
            for m in measurements(("quick",))
        ]

    with pytest.raises(SaccadeError, match=r"quick measured otherwise \(prompts of chart: 1 there, None now\); give"):
        session.run(of(1, 1))
    monkeypatch.setattr(Runner, "run", lambda self: (_ for _ in ()).throw(SaccadeError("It grows.")))
    assert session.run(of(2, 2)).failed == {"quick": "It grows."}


def test_another_revision_target_or_folder_is_refused(
    over: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert over.drafter is not None
    with pytest.raises(SaccadeError, match=r"measured otherwise \(target:"):
        run(replace(over, target=over.drafter))
    mark = json.loads((over.out / MARK).read_text())
    mark["environment"]["revision"] = "0123456789ab"
    (over.out / MARK).write_text(json.dumps(mark))
    with pytest.raises(SaccadeError, match=r"measured otherwise \(environment\.revision: '0123456789ab' there"):
        run(over)
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(SaccadeError, match=r"is not empty and holds no results\.json"):
        run(replace(over, out=tmp_path))
    monkeypatch.setattr("saccade.environment.revision", lambda: "0123456789ab+")
    with pytest.raises(SaccadeError, match="changes that are not committed"):
        Session(replace(over, short=False))
    with pytest.raises(InputError, match="There is no measurement 'quack'; expected some of quick, dream-1"):
        measurements(["quack"])


def test_a_suite_without_its_heads_names_the_command_and_the_rest_runs(over: Setup, tmp_path: Path) -> None:
    setup = over
    session, report = run(setup, ("hivis-figure-7", "quick"))
    assert report.measured == ["quick"]
    command = f"`python -m tools.heads hivis pictures-alone -t {setup.target} -d {setup.drafter} --out {setup.models}`"
    assert f"[1/2] hivis-figure-7: left out, because 2 heads must be trained first: {command}" in LINES
    assert "`python -m tools.heads single-picture-draft -t" in session.plan(measurements(["tabed-single"]))
    plan = session.plan([m.short() for m in measurements(("quick", "hivis-2"))])
    assert plan.startswith("quick: 10 answers; measured\nhivis-2: 30 answers; left out, because 6 heads")
    assert plan.splitlines()[-1].startswith("0 answers are left; about ")
    (setup.models / "heads" / "hivis" / "best").mkdir(parents=True)  # in training
    report = session.run([m.short() for m in measurements(("hivis-figure-7",))])
    assert "heads hivis, pictures-alone are" in report.left_out["hivis-figure-7"]


def test_pages_of_shipped_heads_take_those_and_all_others_the_trained_ones_with_their_steps(setup: Setup) -> None:
    shipped, session = head_paths(), Session(replace(setup, target="pocket", drafter=None))
    small_trees, inflated, hivis_2 = measurements(["small-trees", "small-trees-1024", "hivis-2"])
    trained, bare, other = (setup.models / "heads" / name for name in ("eagle2", "hivis", "dream"))
    shutil.copytree(shipped["eagle2"], trained / "best")
    stages = [{"steps": 200}, {"steps": 1120}]
    mark = {"recipe": {"stages": stages}, "target": session._target, "best": "best", "block_efficiency": 3.0}
    (trained / HEAD_MARK).write_text(json.dumps(mark))
    shutil.copytree(shipped["hivis"], bare)
    assert session.heads(small_trees)["eagle2"] == session.heads(inflated)["eagle2"] == shipped["eagle2"]
    used = session.heads(hivis_2)
    assert (used["eagle2"], used["hivis"]) == (trained / "best", bare)
    assert used["dream"] == shipped["dream"], "where no other is trained"
    target = {"layers": 16, "width": 256, "dtype": "float32", "digest": "t"}
    heads = {name: {"digest": name[0]} for name in ("eagle2", "hivis", "dream")}
    run = SimpleNamespace(header=SimpleNamespace(models={"target": target, "drafter": None, "heads": heads}))
    shown = session._models(hivis_2, cast("RecordedRun", run))
    assert shown.endswith("; heads eagle2 e (1320 steps), hivis h, dream d (shipped).")
    other.mkdir()
    (other / HEAD_MARK).write_text(json.dumps({**mark, "target": "another"}))
    assert session.heads(small_trees)["eagle2"] == shipped["eagle2"], "whatever else is trained"
    with pytest.raises(SaccadeError, match="was trained for another target"):
        session.heads(hivis_2)


def test_a_method_that_loses_exactness_fails_its_suite_alone(over: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(over.out / "quick")
    kept.path_of(over.out / kept.FOLDER, "quick").unlink()
    prepared = Session.prepared

    def planted(self: Session, measurement: Any) -> Any:
        if measurement.name == "tabed-2":
            raise RuntimeError("out of memory")
        ready = prepared(self, replace(measurement, suite=measurement.suite.with_(tasks=measurement.suite.tasks[:1])))
        return replace(ready, methods={"plain": ready.methods["plain"], "chain": wrong(ready.methods["chain"])})

    monkeypatch.setattr(Session, "prepared", planted)
    _, report = run(over, ("tabed-2", *NAMES))
    assert report.measured == ["lvspec-2"]
    assert "chain" in report.failed["quick"]
    assert report.failed["tabed-2"] == "RuntimeError: out of memory"
    assert not kept.path_of(over.out / kept.FOLDER, "quick").exists()


ONE_PASS = {"peagle", "dflash", "dspark"}
"""Heads that no paper's suite names; `benchmarks/one-pass.toml` compares them."""


def test_every_suite_has_a_page_and_every_head_a_recipe() -> None:
    found = measurements()
    assert {m.suite.name for m in found} == set(suite_names())
    named = {head for m in found for head in (*m.heads, m.drafter) if head}
    assert named | ONE_PASS == set(read_recipes().heads)


def test_a_page_is_measured_again_without_any_flag(setup: Setup) -> None:
    """The settings of published pages are the defaults, so that a page's command needs no option."""
    session = Session(replace(setup, target="pocket", drafter=None, **SETTINGS["results"]))
    session._setup = replace(session._setup, short=False)
    (measurement,) = measurements(["sage-4"])
    assert session._command(measurement) == "python -m tools.results sage-4"
    assert session._command(measurement.with_prompts(3)) == "python -m tools.results sage-4 --per-task 3"
    vlm = session._setup.load("pocket", {})
    assert vlm.draft_model is not None
    models = (vlm.target.model, vlm.draft_model.model)
    assert {p.dtype for model in models for p in model.parameters()} == {torch.float32}
    session._setup = replace(session._setup, dtype="bfloat16", threads=2)
    assert session._command(measurement).endswith(" sage-4 --dtype bfloat16 --threads 2")
    heads, results = (
        {p.name: p.default for p in typer.main.get_command(module.app).params} for module in (heads_main, results_main)
    )
    assert SETTINGS["heads"].items() <= heads.items()
    assert SETTINGS["results"].items() <= results.items()
