"""The report's content: tables, Markdown, figures, what the token view knows, and records that are no records."""

from __future__ import annotations

import csv
import errno
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from fake_runs import HOSTILE, make_run, write_run
from typer.testing import CliRunner

from saccade import files
from saccade.bench import metrics
from saccade.bench.compare import cautions, headline
from saccade.bench.records import RecordedRun, read
from saccade.bench.report import figures, tables
from saccade.bench.report.page import embed, render, shown_prompts
from saccade.bench.report.tables import comma_separated, contents, document, latex
from saccade.cli import bench as command
from saccade.cli.option_groups import spread
from saccade.errors import SaccadeError

pytest.importorskip("matplotlib", reason="reports need the extra `report`")

app = typer.Typer()
app.command("report")(spread(command.report))
app.callback()(lambda: None)


@pytest.fixture(scope="module")
def run() -> RecordedRun:
    return make_run(prompts=4, repeats=2, traced=2, hostile=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "one", prompts=4, repeats=1, traced=2, hostile=True)


def test_tables_show_both_taus_and_every_speed_with_its_interval(run: RecordedRun) -> None:
    table = tables.comparison(tables.groups(run)[0])
    names = [column.name for column in table.columns]
    assert {"speed-up", "decoding only", "block efficiency", "accepted length", "score kept"} <= set(names)
    chain = dict(zip(names, table.rows[1].cells, strict=True))
    block, accepted = (float(chain[name].text) for name in ("block efficiency", "accepted length"))
    assert block == pytest.approx(accepted + 1, abs=0.011)  # both are rounded to two places
    for name in ("speed-up", "decoding only", "block efficiency", "accepted length"):
        low, high = map(float, re.findall(r"[\d.]+", chain[name].detail))
        assert low <= float(chain[name].text) <= high


def test_lossy_methods_say_so_in_every_table(run: RecordedRun) -> None:
    group = tables.groups(run)[0]
    every = [tables.comparison(group), tables.scores(group), tables.depths(group), tables.stages(group)]
    for table in every:
        assert table is not None
        rows = {row.cells[0].text: row.cells[0].detail for row in table.rows}
        assert rows["lvspec"] == rows["fly"] == "(lossy)"
        assert rows["chain"] == ""


@pytest.mark.usefixtures("without_figures")
def test_other_tokens_of_a_lossless_method_and_warnings_are_named() -> None:
    run = make_run(prompts=2, repeats=1, methods=["plain", "chain", "lvspec"])
    difference = {"position": 7, "ours": 3, "plain": 4, "logits": {"ours": 2.5, "plain": 2.4}}
    for number, record in enumerate(run.records):
        warned = ["Nothing fits."] if record.key[:2] == ("scene-0", "chain") else []
        run.records[number] = replace(record, equal=False, difference=difference, warnings=warned)
    content = contents([run])
    text, remark = render(content), "chain warned in 1 of 2 answers: Nothing fits."
    assert "chain: 2 of 2 answers, first on scene-0 at position 7: 3 instead of 4 with logits 2.5 and 2.4" in text
    assert "lvspec: 2 of 2" not in text
    assert remark in text
    assert remark in document(content)


def test_markdown_rows_have_as_many_cells_as_the_head_whatever_the_text() -> None:
    table = tables.Table("a|b", [tables.Column(HOSTILE, "")] * 2, [tables.TableRow([tables.Cell(HOSTILE)] * 2)])
    lines = tables.markdown(table).splitlines()
    assert lines[0] == r"**a\|b**"
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines[2:]} == {3}
    assert not any(re.search(r"(?<!\\)<", line) for line in lines)


def test_markdown_names_every_run_and_says_what_columns_mean(run: RecordedRun) -> None:
    other = make_run(Path("other"), prompts=2, repeats=1, methods=["plain", "chain"])
    text = document(contents([run, other]))
    assert text.startswith("**every method of every run")
    assert "## pocket, pocket with pocket-draft (run)" in text
    assert "## pocket, pocket with pocket-draft (other)" in text
    assert "- speed-up: seconds per token of plain decoding over the method's, same prompt" in text
    assert "- accepted length: block efficiency less the target's own token" in text


def test_csv_has_every_number_of_the_comparison_with_its_interval(run: RecordedRun) -> None:
    rows = list(csv.DictReader(io.StringIO(comma_separated(contents([run, run])))))
    assert len({(row["run"], row["task"], row["method"]) for row in rows}) == len(rows) == 2 * 3 * 6
    everything = metrics.by_method(run.records)
    for row in rows[:6]:
        result = everything[row["method"]]
        assert result.speedup is not None
        found = [float(row[name]) for name in ("speedup_value", "speedup_low", "speedup_high", "scores_colour")]
        assert found == [result.speedup.value, result.speedup.low, result.speedup.high, result.scores["colour"]]
    assert list(rows[0])[:4] == ["run", "task", "method", "lossless"]


def test_latex_is_a_table_of_booktabs_whose_names_are_escaped(run: RecordedRun) -> None:
    names = {"chain": "[a_b", "lvspec": "50% & #1\\ {$x^2~}"}
    methods = [{**each, "label": names.get(each["label"], each["label"])} for each in run.header.config["methods"]]
    header = replace(run.header, suite="two\nlines", config={**run.header.config, "methods": methods})
    records = [replace(record, method=names.get(record.method, record.method)) for record in run.records]
    text = latex(contents([replace(run, header=header, records=records)]))
    comments, _, table = text.partition("\\begin")
    assert all(line.startswith("%") for line in comments.split("\n") if line)
    lines = table.splitlines()
    assert lines[0] == "{tabular}{lrrrrrrr}"
    assert [line for line in lines if line.startswith("\\")] == [
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    rows = [line for line in lines if line.endswith(r" \\")]
    assert len(rows) == 7
    assert {len(re.split(r"(?<!\\)&", row)) for row in rows} == {8}
    assert re.match(r"\{\[\}a\\_b & \d\.\d\d \{\\scriptsize \{\[\}\d\.\d\d, \d\.\d\d\]\} & ", rows[2])
    assert any(
        row.startswith(
            r"50\% \& \#1\textbackslash{} \{\$x\textasciicircum{}2\textasciitilde{}\} {\scriptsize (lossy)} & "
        )
        for row in rows
    )
    assert r" & 100\% & " in text


def test_speeds_of_lossless_methods_are_bars_and_only_lossy_ones_are_drawn_against_quality(run: RecordedRun) -> None:
    everything = tables.groups(run)[0]
    lossless = tables.Group("all", {m: r for m, r in everything.results.items() if r.lossless})
    bars, _ = figures.draw(lossless, "a")
    assert bars.title == "Speed-up of lossless methods"
    speeds = {m: str(r.speedup) for m, r in lossless.results.items() if m != "plain"}
    said = re.findall(r"([a-z-]+): ([\d.]+ \[[\d., ]+\])", bars.drawing)
    assert dict(said) == speeds
    assert [float(each.split()[0]) for _, each in said] == sorted(float(s.split()[0]) for s in speeds.values())[::-1]
    assert [plot.title for plot in figures.draw(everything, "b")][:2] == ["Speed against quality", bars.title]
    plain = tables.Group("one", {"plain": everything.results["plain"]})
    assert figures.draw(plain, "c") == []


def test_tokens_know_the_step_that_emitted_them(run: RecordedRun) -> None:
    for prompt in shown_prompts(run, 2):
        for answer in prompt.answers:
            steps = [token.step for token in answer.tokens]
            assert steps == sorted(steps)
            assert steps[0] == 0
            for number, step in enumerate(answer.steps, 1):
                emitted = [token for token in answer.tokens if token.step == number]
                path = [step["nodes"][node] for node in step["path"][1:]]
                assert [token.text for token in emitted] == [*path, step["bonus"]]
                assert [token.kind for token in emitted] == step["kinds"]


def test_an_answer_that_ends_on_a_drafted_token_has_no_bonus_token(run: RecordedRun) -> None:
    record = next(r for r in make_run(prompts=1, traced=1).records if r.method == "chain" and r.trees)
    before = sum(len(tree["path"]) for tree in record.trees[:-1]) + 1
    record.trees[-1] = {
        "tokens": [record.tokens[before - 1], 1, 2, 3],
        "parents": [0, 0, 1, 2],
        "path": [0, 1, 2],
        "start": before,
        "pieces": ["r", "a", "b", "c"],
    }
    record.tokens[before:] = [1, 2]
    record.pieces[before:] = ["a", "b"]
    record.marks[before:] = ["draft", "draft"]
    answer = shown_prompts(RecordedRun(run.folder, run.header, [record], []), 1)[0].answers[0]
    assert answer.steps[-1]["path"] == [0, 1, 2]
    assert answer.steps[-1]["bonus"] is None


def test_pictures_come_from_the_media_folder_only(folder: Path) -> None:
    assert embed(folder, "scene-0.png").uri.startswith("data:image/png;base64,")
    assert "outside" in embed(folder, "../records.jsonl").problem
    assert "outside" in embed(folder, "/etc/hostname").problem
    assert "not in" in embed(folder, "absent.png").problem
    (folder / "media" / "film.mp4").write_bytes(b"\0" * 40)
    assert "no picture" in embed(folder, "film.mp4").problem
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"
    (folder / "media" / "script.png").write_bytes(postscript)
    assert "no picture" in embed(folder, "script.png").problem


@pytest.mark.usefixtures("without_figures")
def test_a_corrupted_record_is_named_with_its_line_and_skipped(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "records.jsonl").read_text().splitlines()
    cut, wrong, count = lines[3][: len(lines[3]) // 2], json.loads(lines[5]), len(lines) - 1
    wrong["stats"] = "none"
    lines[3], lines[5] = cut, json.dumps(wrong)
    (tmp_path / "records.jsonl").write_text("\n".join(lines) + "\n")
    found = contents([read(tmp_path)])[0]
    assert len(found.run.records) == count - 2
    assert [re.search(r"line (\d+): .*skipped\.$", problem)[1] for problem in found.run.problems] == ["4", "6"]  # type: ignore[index]
    assert "line 4" in (text := render([found], prompts=0))
    assert str(tmp_path) not in text


@pytest.fixture(scope="module")
def page(run: RecordedRun) -> str:
    return render(contents([run]))


def test_the_page_loads_nothing_is_small_and_escapes_hostile_text(page: str) -> None:
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", page)
    assert not re.findall(r"url\((?!#)|@import", page)
    assert "default-src 'none'" in page
    assert len(page) < 500_000
    assert "<img src=x" not in page
    assert page.count("<script>") == 2  # the page's own
    assert len(re.findall(r"</script>", page)) == len(re.findall(r"<script", page))


def test_runs_that_lack_something_have_a_report_with_unique_ids(run: RecordedRun, tmp_path: Path) -> None:
    one = make_run(Path("one"), prompts=1, repeats=1, methods=["plain"])
    bare = make_run(Path("bare"), prompts=2, repeats=1, methods=["chain"])
    for record in bare.records:
        record.scores.clear()
    ids = re.findall(r'\bid="([^"]+)"', render(contents([run, one, bare])))
    assert len(ids) == len(set(ids))
    text = render(contents([bare]))
    assert "Speed against quality" not in text
    assert "Speed-up of lossless methods" not in text
    assert "Acceptance by depth" in text
    write_run(tmp_path / "run", prompts=1, methods=[])
    with pytest.raises(SaccadeError, match="no readable record"):
        contents([read(tmp_path / "run")])


@pytest.mark.usefixtures("without_figures")
def test_a_report_says_how_to_write_it_again_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = read(write_run(tmp_path / "runs" / "mine", prompts=1))
    for here, place in ((tmp_path, "runs/mine"), (tmp_path / "runs", "mine")):
        monkeypatch.chdir(here)
        assert f"saccade report {place}\n" in render(contents([run])).replace("</pre>", "\n")


@pytest.mark.usefixtures("without_figures")
def test_a_report_opens_with_the_fastest_lossless_method(run: RecordedRun) -> None:
    said = headline(run)
    results = metrics.by_method(run.records)
    speeds = {m: r.speedup.value for m, r in results.items() if r.lossless and r.speedup and m != "plain"}
    best = max(speeds, key=lambda method: speeds[method])
    assert said.startswith(
        f"{best}, level with dynamic-tree and prompt-lookup by its prompts, is {speeds[best]:.2f} times (95 % interval "
    )
    text = render(contents([run]))
    assert text.index('class="headline"') < text.index("Comparison")
    assert said.split(" (")[0] in document(contents([run]))


def test_a_headline_names_what_its_prompts_cannot_tell_apart() -> None:
    near = make_run(prompts=12, methods=("plain", "chain", "prompt-lookup"), seed=1)
    ours, theirs = (metrics.records_by_method(near.records)[name] for name in ("chain", "prompt-lookup"))
    for fast, slow in zip(ours, theirs, strict=True):
        slow.stats["seconds"] = {stage: 1.0 * value for stage, value in fast.stats["seconds"].items()}
        slow.stats["new_tokens"] = fast.stats["new_tokens"]
    assert headline(near).startswith("chain, level with prompt-lookup by its prompts, is ")
    clones = [replace(slow, method=f"clone-{i}") for slow in theirs for i in range(3)]
    crowd = replace(near, records=[*near.records, *clones])
    assert headline(crowd).startswith("chain, level with 4 others by its prompts, is ")
    for slow in theirs:
        slow.stats["seconds"]["total"] *= 1.1
    assert headline(near).startswith("chain, the fastest of 2 lossless methods, is ")


def test_a_headline_claims_no_speed_within_the_noise_and_names_a_faster_lossy_method() -> None:
    slow = make_run(prompts=12, methods=("plain", "chain", "lvspec"), slower={"chain": 3.0}, seed=1)
    said = headline(slow)
    assert said.startswith("No lossless method is clearly faster than plain decoding; the best, chain, has ")
    assert "lvspec, which is lossy, is " in said
    assert "of the score." in said
    assert headline(make_run(prompts=4, methods=("plain",))) == ""
    assert headline(make_run(prompts=1, repeats=1, methods=("plain", "chain"))).endswith(
        "; its one answer is plain decoding's, token for token."
    )


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(
    ("prompts", "words"),
    [(1, "One prompt"), (5, "Only 5 prompts: from fewer than 6"), (8, "single tasks, which need 6: scene 4, chart 4")],
)
def test_few_prompts_are_a_caution(prompts: int, words: str) -> None:
    small = make_run(prompts=prompts, repeats=1)
    assert words in " ".join(cautions(small))
    assert words in render(contents([small]))
    assert words in document(contents([small]))
    assert not list(cautions(make_run(prompts=12, repeats=1)))


@pytest.mark.usefixtures("without_figures")
def test_the_command_writes_page_and_tables_beside_the_run(folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(folder / f"report.{kind}") for kind in ("html", "md", "csv", "tex")]
    assert (folder / "report.md").read_text().count("| chain |") == 4  # all tasks, two tasks, scores
    out = tmp_path / "deep" / "page.html"
    result = CliRunner().invoke(app, ["report", str(folder), str(folder), "-o", str(out)])
    assert out.read_text().count('class="run"') == 2
    refused = CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "page.csv")]).exception
    assert "give --out a name that ends in .html" in str(refused)


@pytest.mark.usefixtures("without_figures")
def test_a_report_that_cannot_be_written_leaves_the_old_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "report.html").write_text("the old page")

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_sync", full)
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert "The disk is full" in str(result.exception)
    assert (folder / "report.html").read_text() == "the old page"
    assert not list(folder.glob("*.part"))
