"""The command line as a whole, its lists and predictions, and heads that it describes and exports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Shell

import checkpoints
from checkpoints import ready
from saccade import __version__
from saccade.cli.option_groups import heads_by_name
from saccade.cpu import usable_cores
from saccade.data import catalogue
from saccade.draft.heads.head import HeadConfig, build_head
from saccade.draft.heads.store import save_head
from saccade.errors import InputError
from saccade.methods import METHODS
from saccade.wording import count


def test_the_version_is_one_line(shell: Shell) -> None:
    result = shell("--version")
    assert (result.code, result.out) == (0, f"{__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "demo generate chat methods doctor"),
        (("batch", "--help"), "-p --images-per-row FILE.journal/records.jsonl captions.jsonl"),
        (("serve", "--help"), "speculation /v1/chat/completions /metrics 127.0.0.1 pocket"),
    ],
)
def test_help_teaches(shell: Shell, arguments: tuple[str, ...], words: str) -> None:
    result = shell(*arguments)
    assert result.code == 0
    assert all(word in result.out.replace("\n", " ") for word in words.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gnerate"], "No such command 'gnerate'. Did you mean 'generate'; see `saccade --help`."),
        (["generate", "--nope", "x"], "No such option: --nope"),
        (["generate"], "Missing argument 'prompt'; see `saccade generate --help`."),
        (["generate", "-n", "many", "x"], "Invalid value for '--max-new-tokens'"),
        (["generate", "-t"], "Option '-t' requires an argument; see `saccade"),
        (["methods", "warp"], "Unknown method 'warp'; expected one of plain, chain"),
        (["methods", "sgae"], "Unknown method 'sgae' (did you mean sage?); expected one of plain, chain"),
        (
            ["generate", "--gamma", "5", "x"],
            "No such option: --gamma; options of methods are given with --set, such as",
        ),
        (["generate", "--gamma", "5", "x"], "such as --set gamma=5; see `saccade generate --help`."),
        (["chat", "--max-ngram=2"], "such as --set max_ngram=2; see"),
        (["train", "eagle2", "--gamma", "5"], "No such option: --gamma (Possible options: --data); see `saccade train"),
    ],
)
def test_wrong_arguments_are_one_sentence(shell: Shell, arguments: list[str], words: str) -> None:
    assert words in shell(*arguments).complaint


@pytest.mark.parametrize(
    ("method", "words"), [("chain", "(--drafter on the"), ("hivis", "(--drafter or --head on the command line)")]
)
def test_a_bench_without_a_drafter_says_which_option_gives_one(
    shell: Shell, method: str, words: str, tmp_path: Path
) -> None:
    arguments = ("--suite", "quick", "--methods", method, "--out", tmp_path / "run")
    assert words in shell("bench", *arguments, "-t", ready("llama")).complaint


def test_every_method_is_listed_with_what_it_needs(shell: Shell) -> None:
    listed = json.loads(shell("methods", "--json").out)
    assert list(listed) == list(METHODS)
    assert all(set(m) == {"summary", "source", "lossless", "needs", "options"} for m in listed.values())
    page = shell("methods").out
    for name, method in METHODS.items():
        assert name in page
        assert method.summary in page
        assert method.source in page


def test_the_doctor_tells_what_is_here(shell: Shell) -> None:
    report = json.loads(shell("doctor", "--json").out)
    assert report["packages"]["saccade"] == __version__
    assert report["devices"][0].startswith(f"cpu, {count(usable_cores(), 'core')}, ")
    assert report["families"]["llava"]["tested_on"] == "cpu"
    assert {"tensorboard", "fastapi", "llguidance", "pyarrow", "datasets"} <= set(report["packages"])
    page = shell("doctor").out
    assert "tested on a CPU" in page
    assert "works" not in page
    for package, version in report["packages"].items():
        assert package in page
        assert (version or "not installed") in page


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("saccade be", "bench"),
        ("saccade bench --per", "--per-task"),
        ("saccade generate -m dyn", "dynamic-tree"),
        ("saccade bench --suite quick-", ""),
        ("saccade bench --suite qui", "quick"),
        ("saccade bench --methods chain,sa", "chain,sage"),
        ("saccade methods hiv", "hivis"),
    ],
)
def test_the_shell_completes_names_that_this_version_knows(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, line: str, offered: str
) -> None:
    monkeypatch.setenv("_SACCADE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    assert shell().out.split() == offered.split()


@pytest.mark.parametrize(
    ("words", "line", "shown"),
    [
        (["generate", "--nope"], None, ""),
        (["generate", "--gamma", "5", "x"], None, ""),
        ([], "saccade generate -m dyn", "dynamic-tree\n"),
    ],
    ids=["wrong", "setting", "completion"],
)
def test_nothing_heavy_is_imported_before_it_is_needed(words: list[str], line: str | None, shown: str) -> None:
    """Wrong arguments answer at once; completion runs at every press of the key."""
    code = f"""
import sys
from saccade.cli import main
try:
    main({words})
except SystemExit:
    print([m for m in ("torch", "transformers", "numpy", "PIL", "matplotlib") if m in sys.modules])
"""
    completion = {"_SACCADE_COMPLETE": "complete_bash", "COMP_WORDS": line or "", "COMP_CWORD": "3"}
    environment = {**os.environ, **(completion if line else {})}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == f"{shown}[]\n"


def test_python_has_nothing_to_collect_at_the_end_of_a_command() -> None:
    code = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 1000))
from saccade.cli import main
main(["--version"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{__version__}\nTrue\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "generate -t pocket -i none.png x -m dynamictree",
            "Unknown method 'dynamictree' (did you mean dynamic-tree?)",
        ),
        ("generate -t pocket -i none.png x -m chain --set gama=5", "no option gama (did you mean gamma?)"),
        ("serve -t pocket --set gama=5", "No method has an option gama (did you mean gamma?); `saccade methods NAME`"),
        ("bench --suite quik", "There is no suite 'quik' (did you mean quick?)"),
        ("bench --suite quick --methods chian", "Unknown method 'chian' (did you mean chain?)"),
        ("train hivsi -t pocket --data x -o y", "There is no recipe 'hivsi' (did you mean hivis?)"),
    ],
)
def test_a_slip_in_a_name_is_answered_before_torch_is_imported(line: str, words: str) -> None:
    code = f"""
import sys
sys.modules["torch"] = None
from saccade.cli import main
main({line.split()})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr


def test_every_data_set_has_a_line_with_its_papers(shell: Shell) -> None:
    lines = shell("datasets").out.splitlines()
    assert len(lines) == len(catalogue.names())
    assert "textvqa  HiViS (@hivis), SAGE (@sage): questions about text in photographs" in lines
    assert "mmmu  no paper: college-level questions with up to seven pictures" in lines


def test_one_data_set_is_shown_as_a_paper_uses_it(shell: Shell) -> None:
    shown = shell("datasets", "pope@tabed").out
    for line in ("path: lmms-lab-encoder/POPE", "split: test", "images: image", "id: question_id", "count: 100"):
        assert f"  {line}\n" in shown
    assert "detailed explanation of your reasoning leading to the answer. {question}" in shown
    assert "max_new_tokens: 128" in shown
    assert "not compared with the hub" in shown


def test_a_prediction_has_length_efficiency_speedup_break_even_and_best_gamma(shell: Shell) -> None:
    shown = " ".join(shell("predict", "--acceptance", "0.7", "--cost", "0.05").out.split())
    for line in ("length 1.94", "block efficiency 2.94", "speedup 2.35", "break even 0.2 best gamma 6, speedup"):
        assert line in shown
    assert "Invalid value for '--acceptance'" in shell("predict", "-a", "1.1", "-c", "0.1").complaint
    assert "Invalid value for '--cost'" in shell("predict", "-a", "0.7", "-c", "inf").complaint


def own_head(folder: Path, kind: str = "eagle3") -> Path:
    torch.manual_seed(0)
    save_head(build_head(HeadConfig.from_target(checkpoints.vlm("llava").target, kind)), folder)
    return folder


def test_a_head_goes_out_and_is_described(shell: Shell, tmp_path: Path) -> None:
    head, out = own_head(tmp_path / "head"), tmp_path / "out"
    done = shell("export", head, "--to", "speculators", "-t", ready("llava"), "-o", out)
    assert done.code == 0
    assert "it loads here again" in done.out
    assert (out / "README.md").read_text().startswith("---\nlibrary_name: speculators\n")
    shown = shell("inspect", out, "-t", ready("llava"))
    assert shown.code == 0
    assert "head of the kind eagle3, layout of speculators" in shown.out
    assert "vocabulary" in shown.out
    found = json.loads(shell("inspect", out, "-t", ready("llava"), "--json").out)
    assert (found["fits"], found["layout"], found["kind"]) == (True, "speculators", "eagle3")
    answer = shell("generate", "-t", ready("llava"), "-d", out, "-n", "8", "--json", "What is this?")
    assert json.loads(answer.out)["method"] == "eagle3"


def test_a_draft_model_with_a_mask_token_is_described_and_drafts_in_one_pass(shell: Shell, tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path / "pard", seed=2, pard_token=3)
    assert "with which it drafts in one pass by default (method pard)" in shell("inspect", folder).out
    answer = shell("generate", "-t", ready("llava"), "-d", folder, "-n", "8", "--json", "What is this?")
    assert json.loads(answer.out)["method"] == "pard"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pard_token": 100_000}))
    for command in (("generate", "What?"), ("serve", "--plan"), ("inspect", folder)):
        pair = () if folder in command else ("-t", ready("llava"), "-d", folder)
        assert "is 100000, which is not a whole number from 0 to" in shell(*command, *pair).complaint


def test_a_head_that_does_not_fit_ends_with_1(shell: Shell, tmp_path: Path) -> None:
    shown = shell("inspect", own_head(tmp_path / "head"), "-t", "pocket")
    assert shown.code == 1
    assert "was made for another target" in shown.out.replace("\n", " ")


def test_what_cannot_be_written_or_read_is_one_sentence(shell: Shell, tmp_path: Path) -> None:
    head = own_head(tmp_path / "head", "hivis")
    refused = shell("export", head, "--to", "speculators", "-t", ready("llava"), "-o", tmp_path / "out").complaint
    assert "The layout speculators cannot hold this hivis head: only eagle3 heads are written for vLLM" in refused
    assert "Missing option '--target'" in shell("export", head, "--to", "eagle", "-o", tmp_path / "out").complaint
    assert "holds neither a head that is known nor a model" in shell("inspect", tmp_path).complaint


def test_an_export_that_cannot_be_is_refused_before_the_target_is_loaded(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.loading.load_model", None)
    head, out = own_head(tmp_path / "head"), tmp_path / "out"
    refused: dict[str, list[Any]] = {
        "There is no layout 'foo' to export to; choose one of": [head, "--to", "foo", "-o", out],
        "exists and is not an empty folder; give a new one": [head, "--to", "eagle", "-o", head],
        "There is no folder": [tmp_path / "nope", "--to", "eagle", "-o", out],
        "The dtype 'half' is not one of": [head, "--to", "eagle", "-o", out, "--dtype", "half"],
    }
    for words, arguments in refused.items():
        assert words in shell("export", *arguments, "-t", ready("llava")).complaint


def test_the_built_in_target_is_described_by_its_name(shell: Shell) -> None:
    found = json.loads(shell("inspect", "pocket", "--json").out)
    assert (found["holds"], found["facts"]["layers"]) == ("model", 16)


def test_methods_are_listed_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from saccade.cli import main; main(['methods', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(json.loads(done.stdout)) == list(METHODS)


def test_heads_on_the_command_line_have_one_name_each(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert heads_by_name(["runs/mine/", "x=runs/other", str(odd)]) == {
        "mine": "runs/mine/",
        "x": "runs/other",
        "a=b": str(odd),
    }
    with pytest.raises(InputError, match=r"Two heads are named 'best'.*--head NAME=FOLDER"):
        heads_by_name(["a/best", "b/best"])
