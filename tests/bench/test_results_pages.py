"""`python -m tools.results`: many suites on one revision, resumed after any stop, never mixed, published as a whole."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from bench_kit import wrong

from saccade.bench.records import FILE, RecordedRun
from saccade.bench.runner import Runner
from saccade.errors import InputError, SaccadeError
from saccade.pocket import head_paths
from tools.heads.catalogue import read as read_recipes
from tools.heads.workshop import MARK as HEAD_MARK
from tools.results.catalogue import measurements, suite_names
from tools.results.measure import Report, Session, Setup
from tools.results.pages import MARK, Folder

NAMES = ("quick", "lvspec-2")
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


def published(session: Session, report: Report, docs: Path, names: tuple[str, ...] = NAMES) -> dict[str, str]:
    session.folder.publish(docs, measurements(names), report.left_out)
    return {path.name: path.read_text(encoding="utf-8") for path in docs.iterdir()}


def test_pages_open_with_the_verdict_and_the_index_lists_them(over: Setup, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "of-an-earlier-revision.md").write_text("old")
    session, report = run(over)
    assert report.measured == list(NAMES)
    assert not report.failed
    pages = published(session, report, docs)
    assert pages.keys() == {"README.md", "quick.md", "lvspec-2.md"}, "nothing of another revision stays"
    title, _, verdict, *_ = pages["lvspec-2.md"].splitlines()
    assert title.startswith("# lvspec-2: ")
    assert verdict.startswith("The order of LVSpec, Table 2, in block efficiency, LVSpec \\> LVSpec-no-PST, ")
    revision = json.loads((over.out / MARK).read_text())["environment"]["revision"]
    for text in (pages["README.md"], pages["quick.md"]):
        assert f"revision {revision}" in text
        assert "bfloat16 instructions, 1 thread;" in text
    assert "[lvspec-2](lvspec-2.md)" in pages["README.md"]
    assert "`python -m tools.results quick -t TARGET -d DRAFT --short --dtype float32`" in pages["quick.md"]
    assert str(tmp_path) not in "".join(pages.values()), "no folder of this machine"


def test_a_reason_stands_behind_the_verdict_that_it_explains(over: Setup, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    session, report = run(over, ("lvspec-2",))
    found = re.search(
        r"LVSpec-no-PST, (.*?) on this pair", published(session, report, docs, ("lvspec-2",))["lvspec-2.md"]
    )
    assert found is not None
    for outcome, is_shown in ((found[1], True), ("holds in 7 of 9 comparisons", False)):
        (docs / "reasons.toml").write_text(f'[lvspec-2]\noutcome = "{outcome}"\nwhy = "The moon\\nis full."\n')
        pages = published(session, report, docs, ("lvspec-2",))
        assert (pages["lvspec-2.md"].split("\n\n")[2] == "The moon is full.") == is_shown
        assert any("reasons.toml explains why lvspec-2 holds in 7" in line for line in LINES) != is_shown
        assert "reasons.toml" in pages, "it outlasts the pages"
    (docs / "reasons.toml").write_text("[lvspec-2]\nbecause = 1\n")
    with pytest.raises(SaccadeError, match=r"reasons\.toml, lvspec-2: unknown key 'because'"):
        published(session, report, docs, ("lvspec-2",))


def test_pages_are_computed_anew_from_the_records_and_name_both_revisions(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(measured, out)
    found = measurements(NAMES)
    before = {name: (out / "pages" / f"{name}.md").read_text() for name in NAMES}
    monkeypatch.setattr("saccade.environment.revision", lambda: "0123456789ab+")
    folder = Folder(out, LINES.append)
    with pytest.raises(SaccadeError, match="changes that are not committed"):
        folder.render(found)
    monkeypatch.setattr("saccade.environment.revision", lambda: "0123456789ab")
    monkeypatch.setattr("saccade.bench.metrics.passes", lambda record: 1)
    folder.render(found)
    for name, text in before.items():
        now = (out / "pages" / f"{name}.md").read_text()
        assert "Computed from the records by revision 0123456789ab." in now
        assert now.splitlines()[0] == text.splitlines()[0]
        assert re.sub(r" Computed from [^.]*\.", "", now) != text, "by the present definition of a pass"
    folder.publish(tmp_path / "docs", found, {})
    revision = json.loads((out / MARK).read_text())["environment"]["revision"]
    index = (tmp_path / "docs" / "README.md").read_text()
    assert f"All of revision {revision}; " in index
    assert "Computed from the records by revision 0123456789ab." in index


def test_a_figure_s_page_has_its_drawings(setup: Setup, tmp_path: Path) -> None:
    names = ("tabed-figure-3",)
    session, (measurement,) = Session(setup, LINES.append), measurements(names)
    small = measurement.short().suite
    small = small.with_(trace=1, tasks=small.tasks[:1], methods=(small.methods[0], *small.methods[-2:]))
    pages = published(session, session.run([replace(measurement, suite=small)]), tmp_path / "docs", names)
    shown = re.findall(r"!\[.*\]\((.*)\)", pages["tabed-figure-3.md"])
    assert len(shown) >= 2
    assert "![Weights of the views](tabed-figure-3-" in pages["tabed-figure-3.md"]
    assert all(pages[file].startswith('<svg xmlns="http://www.w3.org/2000/svg" ') for file in shown)


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
    more = [replace(m, suite=m.suite.with_(tasks=m.suite.tasks[:2], per_task=2)) for m in measurements(("quick",))]
    with pytest.raises(SaccadeError, match=r"quick measured otherwise \(prompts of scene: 1 there, 2 now\); give"):
        session.run(more)


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
    text = published(session, report, tmp_path / "docs", ("hivis-figure-7", "quick", "tabed-1"))["README.md"]
    assert "- hivis-figure-7: its heads hivis, pictures-alone are not trained; `make heads` trains them." in text
    assert "- tabed-1: left for later; `python -m tools.results tabed-1` measures it." in text
    assert str(tmp_path) not in text
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
    (over.out / "pages" / "quick.md").unlink()
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
    assert not (over.out / "pages" / "quick.md").exists()


ONE_PASS = {"peagle", "dflash", "dspark"}
"""Heads that no paper's suite names; `benchmarks/one-pass.toml` compares them."""


def test_every_suite_has_a_page_and_every_head_a_recipe() -> None:
    found = measurements()
    assert {m.suite.name for m in found} == set(suite_names())
    assert {head for m in found for head in m.heads} | ONE_PASS == set(read_recipes().heads)
