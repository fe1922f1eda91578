"""The run: what is recorded, in which order, what is noticed, and how it goes on after a stop."""

from __future__ import annotations

import json
import resource
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from bench_kit import suite, wrong
from PIL import Image

import saccade
from processes import forked
from saccade.bench import answering, metrics, runner
from saccade.bench.compare import cautions
from saccade.bench.cost import Costs
from saccade.bench.preparing import Prepared, prepare
from saccade.bench.questions import Question, UserTurn
from saccade.bench.records import FILE, LineFile, first_difference, read
from saccade.bench.report.tables import remarks
from saccade.bench.runner import Mismatch, Progress, Runner, balanced, earlier_run
from saccade.draft import pruning
from saccade.errors import SaccadeError
from saccade.model_spec import ModelSpec

pytestmark = pytest.mark.formats

Prepare = Callable[..., Prepared]


def with_method(prepared: Prepared, label: str, vlm: saccade.VLM) -> Prepared:
    return replace(prepared, methods={**prepared.methods, label: vlm})


def test_every_prompt_method_and_repeat_has_one_record(prepared: Prepare, folder: Path) -> None:
    run = Runner(prepared(methods=["chain", "prompt-lookup"], repeats=2), folder).run()
    assert len(run.records) == 2 * 3 * 2
    assert Counter((r.method, r.repeat) for r in run.records) == {
        (method, repeat): 2 for method in ("plain", "chain", "prompt-lookup") for repeat in (0, 1)
    }
    before = (folder / FILE).read_bytes()
    assert len(before.splitlines()) == 1 + len(run.records)
    assert {(r.method, r.equal) for r in run.records if r.method != "prompt-lookup"} == {
        ("plain", None),
        ("chain", True),
    }
    seen: list[Progress] = []
    Runner(prepared(methods=["chain", "prompt-lookup"], repeats=2), folder, seen.append).run()
    assert not seen
    assert (folder / FILE).read_bytes() == before, "a complete run stays as it is"


def test_a_record_carries_what_a_report_needs(prepared: Prepare, folder: Path) -> None:
    run = Runner(prepared(methods=["chain"]), folder).run()
    assert run.header.models["target"]["dtype"] == "float32"
    assert run.header.environment["torch"]
    options = run.header.config["methods"][1]["options"]
    assert (options["draft_with"], options["tree"], options["gamma"]) == ("model", "chain", 5)
    costs = Costs.of(run.header.costs)
    assert costs is not None
    assert {1, 6} <= set(costs.target)
    for record in run.records:
        assert "".join(record.pieces) == record.text
        assert len(record.pieces) == len(record.tokens) == len(record.marks)
        assert set(record.scores) == {"count", "colour", "shape", "size", "thing", "tally"}
        assert {"vision", "prefill", "draft_prefill", "draft", "verify", "rest", "inputs"} <= set(
            record.stats["seconds"]
        )
        assert [(folder / "media" / name).is_file() for name in record.media] == [True]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_every_method_stands_everywhere_and_follows_every_other_equally_often(count: int) -> None:
    labels = [str(i) for i in range(count)]
    rows = [balanced(labels, row) for row in range(2 * count)]
    assert all(sorted(row) == labels for row in rows)
    assert set(Counter((place, label) for row in rows for place, label in enumerate(row)).values()) == {2}
    pairs = Counter(pair for row in rows for pair in pairwise(row))
    assert set(pairs.values()) <= {2}
    assert len(pairs) == count * (count - 1)


def test_a_changed_token_fails_in_float32_and_stays_failed(prepared: Prepare, vlm: saccade.VLM, folder: Path) -> None:
    planted = with_method(prepared(methods=["chain"]), "chain", wrong(vlm.using("chain")))
    with pytest.raises(Mismatch, match="chain is lossless but differs from plain decoding on scene-") as caught:
        Runner(planted, folder).run()
    found = [r for r in read(folder).records if r.equal is False]
    assert len(found) == 1
    difference = found[0].difference
    assert difference is not None
    assert difference["ours"] != difference["plain"]
    assert difference["logits"]["plain"] > difference["logits"]["ours"]
    with pytest.raises(Mismatch) as again:
        Runner(planted, folder).run()
    assert str(again.value) == str(caught.value)


def test_in_bfloat16_a_difference_is_reported_and_the_run_goes_on(pair: tuple[str, str], folder: Path) -> None:
    vlm = saccade.load(*pair, dtype="bfloat16")
    planted = with_method(prepare(suite(), vlm, ModelSpec("t", "d")), "chain", wrong(vlm.using("chain")))
    run = Runner(planted, folder).run()
    chain = metrics.by_method(run.records)["chain"]
    assert (chain.equal, chain.compared) == (0, 2)
    assert all(r.difference for r in run.records if r.method == "chain")


def test_a_method_that_could_not_do_as_asked_is_remarked_on(
    prepared: Prepare, vlm: saccade.VLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dropped(*_: object) -> list[int]:
        pruning._warn("nothing fits")
        return []

    monkeypatch.setattr(pruning.Pruning, "dropped", dropped)
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    run = Runner(prepared(methods=["chain", "specvlm"], per_task=2), folder).run()
    warned = {r.method: r.warnings for r in run.records}
    assert (warned["plain"], warned["chain"]) == ([], [])
    (words,) = warned["specvlm"]
    assert words.startswith("The target's attention does not apply to the drafter's visual tokens: nothing fits.")
    assert words in shown
    assert f"specvlm warned in 2 of 2 answers: {words}" in remarks(run)


def test_lossy_and_sampled_answers_are_not_compared(prepared: Prepare, vlm: saccade.VLM, tmp_path: Path) -> None:
    lossy = wrong(vlm.using("chain"))
    lossy.lossless = False
    run = Runner(with_method(prepared(), "chain", lossy), tmp_path / "lossy").run()
    records = [r for r in run.records if r.method == "chain"]
    assert all(r.equal is None and r.scores and not r.lossless for r in records)
    runs = [Runner(prepared(sampling={"temperature": 1.0}), tmp_path / name).run() for name in "ab"]
    assert all(r.equal is None for r in runs[0].records)
    assert [r.tokens for r in runs[0].records] == [r.tokens for r in runs[1].records]
    pictures = {
        name: Image.new("RGB", (8, 8), (n, 0, 0)) for n, name in enumerate(["猫", "狗", "a/b", "a_b", "x" * 300])
    }
    for name, image in pictures.items():  # ids of any letters
        saved = answering.save(Question(name, "mine", (UserTurn((), "", (image,)),)), tmp_path)
        assert Image.open(tmp_path / "media" / saved[0][0]).getpixel((0, 0)) == image.getpixel((0, 0)), name


def test_trees_are_kept_of_the_first_prompts_only(prepared: Prepare, folder: Path) -> None:
    run = Runner(prepared(methods=["chain"], trace=1, repeats=2), folder).run()
    traced = {(r.prompt_id, r.method, r.repeat) for r in run.records if any(len(t["tokens"]) > 1 for t in r.trees)}
    assert traced == {("scene-0", "chain", 0)}
    tree = next(r for r in run.records if (r.prompt_id, r.method, r.repeat) in traced).trees[0]
    assert len(tree["tokens"]) == len(tree["parents"]) == len(tree["pieces"]) == 6


# --------------------------------------------------------------------------- stopping and going on


def test_a_killed_run_goes_on_without_loss_or_repeat(prepared: Prepare, folder: Path) -> None:
    process = forked(lambda: Runner(prepared(repeats=200), folder).run())
    try:
        while process.is_alive() and _lines(folder) < 6:
            time.sleep(0.01)
    finally:
        process.kill()
        process.join()
    whole = [line for line in (folder / FILE).read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    kept = read(folder).records
    assert 5 <= len(kept) < 800

    calls: list[str] = []
    last = len(kept) + 6

    def stop(progress: Progress) -> None:
        calls.append(progress.doing)
        if progress.done >= last:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Runner(prepared(repeats=200), folder, stop).run()
    run = read(folder)
    assert (folder / FILE).read_bytes().startswith(b"".join(whole))
    assert [r.key for r in run.records[: len(kept)]] == [r.key for r in kept]
    keys = [json.loads(line) for line in (folder / FILE).read_text().splitlines() if line.endswith("}")][1:]
    assert max(Counter((k["prompt_id"], k["method"], k["repeat"]) for k in keys).values()) == 1


def _lines(folder: Path) -> int:
    path = folder / FILE
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def test_a_damaged_record_is_reported_with_its_line_and_asked_again(prepared: Prepare, folder: Path) -> None:
    complete = Runner(prepared(), folder).run()
    lines = (folder / FILE).read_text().splitlines()
    lines[2] = lines[2][:40]
    (folder / FILE).write_text("\n".join(lines) + "\n")
    assert read(folder).problems == [f"{folder / FILE}, line 3: not valid JSON (cut off or damaged); skipped."]
    run = Runner(prepared(), folder).run()
    assert {r.key for r in run.records} == {r.key for r in complete.records}
    assert len(run.problems) == 1


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_one_writes(prepared: Prepare, folder: Path) -> None:
    with (
        LineFile(folder / FILE),
        pytest.raises(SaccadeError, match=r"Another run is writing to .*; wait for it, or choose another folder"),
    ):
        Runner(prepared(), folder).run()
    assert (folder / FILE).read_bytes() == b"", "the first run alone writes"
    assert len(Runner(prepared(), folder).run().records) == 4


def test_what_another_run_wrote_before_it_let_go_is_taken_over(
    prepared: Prepare, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs begin at once: the second one looks before the first one is done, and gets the lock afterwards."""

    class Late(LineFile):
        def __init__(self, path: Path) -> None:
            monkeypatch.setattr(runner, "LineFile", LineFile)
            Runner(prepared(), path.parent).run()
            super().__init__(path)

    monkeypatch.setattr(runner, "LineFile", Late)
    assert len(Runner(prepared(), folder).run().records) == 4
    assert len((folder / FILE).read_text().splitlines()) == 5, "one header, four records"


def test_a_run_grows_by_more_prompts_and_says_so(prepared: Prepare, folder: Path) -> None:
    first = Runner(prepared(), folder).run()
    assert not first.header.grown
    assert not [line for line in cautions(first) if "added" in line]
    for size, sizes in ((3, [2]), (5, [2, 3])):
        before = (folder / FILE).read_bytes()
        run = Runner(prepared(per_task=size), folder).run()
        assert (folder / FILE).read_bytes().startswith(before)
        assert run.header.grown == sizes
        assert not run.problems
        assert run.records[: len(first.records)] == first.records
        assert Counter(r.method for r in run.records) == {"plain": size, "chain": size}
    assert [line for line in cautions(run) if "added after answers to 2, 3:" in line]
    whole = Runner(prepared(per_task=5), folder.with_name("whole")).run()
    assert [r.key for r in run.records] == [r.key for r in whole.records]
    assert run.header.config == whole.header.config
    for changes, words in (
        ({"per_task": 4}, r"per_task: 5 there, 4 now"),
        ({"per_task": 6, "seed": 1}, "configuration differs"),
        ({"per_task": 6, "max_new_tokens": 5}, r"max_new_tokens: \d+ there, 5 now"),
    ):
        with pytest.raises(SaccadeError, match=words):
            Runner(prepared(**changes), folder).run()
    lines = (folder / FILE).read_bytes().splitlines(keepends=True)
    (folder / FILE).write_bytes(b"".join([*lines, lines[0]]))
    assert read(folder).header == run.header
    assert "neither a run's header nor a record" in read(folder).problems[0], "one that did not grow comes first"


def test_a_run_does_not_grow_on_other_questions(
    prepared: Prepare, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Runner(prepared(), folder).run()
    more = prepared(per_task=3)
    swapped = {task: group[::-1] for task, group in more.questions.items()}
    with pytest.raises(SaccadeError, match=r"configuration differs"):
        Runner(replace(more, questions=swapped), folder).run()


def test_a_refused_configuration_names_the_method_that_differs(prepared: Prepare, folder: Path) -> None:
    folder.mkdir()
    (folder / FILE).write_text('{"kind": "run", "su')  # of a run killed within its header
    Runner(prepared(), folder).run()
    with pytest.raises(SaccadeError, match=r"configuration differs \(seed: 0 there, 3 now\); choose another folder"):
        Runner(prepared(seed=3), folder).run()
    for method, words in (
        ({"name": "chain", "label": "chain", "gamma": 3}, r"\(methods.chain.options.gamma: 5 there, 3 now\)"),
        ("static-tree", r"\(methods.chain: {'name': 'chain', .* there, None now\)"),
    ):
        with pytest.raises(SaccadeError, match=words):
            Runner(prepared(methods=[method]), folder).run()


def test_other_weights_of_the_same_size_are_refused_in_the_same_folder(
    pair: tuple[str, str], prepared: Prepare, folder: Path
) -> None:
    Runner(prepared(), folder).run()
    other = saccade.load(*pair, dtype="float32", draft_dtype="float32")
    spec = ModelSpec("tiny", "tinier")
    assert earlier_run(folder, prepare(suite(), other, spec)) is not None
    for changed, model in (("drafter", other.draft_model), ("target", other.target)):
        assert model is not None
        with torch.no_grad():
            model.model.get_decoder().layers[1].mlp.up_proj.weight.mul_(1.01)
        with pytest.raises(SaccadeError, match=rf"models differs \({changed}.digest: '\w+' there, '\w+' now\)"):
            earlier_run(folder, prepare(suite(), other, spec))


def test_a_full_disk_stops_clearly_and_leaves_the_records_intact(prepared: Prepare, folder: Path) -> None:
    Runner(prepared(per_task=4), folder.with_name("whole")).run()
    lines = (folder.with_name("whole") / FILE).read_bytes().splitlines(keepends=True)
    room = sum(map(len, lines[:4])) + len(lines[4]) // 2  # the header, three records and a piece of the next
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        with pytest.raises(SaccadeError, match="the records so far are intact, so free some space and run the same"):
            Runner(prepared(per_task=4), folder).run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    kept = read(folder).records
    assert len(kept) in (3, 4)  # the second header may be some digits shorter
    run = Runner(prepared(per_task=4), folder).run()
    assert [r.key for r in run.records[: len(kept)]] == [r.key for r in kept]
    assert len(run.records) == 8


@pytest.mark.parametrize(
    ("ours", "plain", "position"),
    [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [], None)],
)
def test_the_first_difference_counts_a_missing_token_too(
    ours: list[int], plain: list[int], position: int | None
) -> None:
    assert first_difference(ours, plain) == position
