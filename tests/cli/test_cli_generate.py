"""`saccade generate`: answers, marks, JSON, interruptions, pipes, processes of `torchrun`, and what is refused."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Shell
from rich.console import Console
from transformers import GenerationConfig

from checkpoints import picture, ready, saved_picture, tokenizer, vlm
from over_processes import run_split
from processes import exit_code_of
from saccade import load
from saccade.cli import main, screen
from saccade.draft import pruning
from saccade.engine.row import sampling_of
from saccade.engine.step import StepRunner
from saccade.inputs.families.family import Prompt
from saccade.methods import METHODS
from saccade.methods import options as options_of
from saccade.model_spec import ModelSpec
from saccade.output import Chunk, Mark
from saccade.pocket import draft_path, head_path
from saccade.profile import write_profile

PAIR = ("-t", ready("llava"), "-d", ready("llava-draft"))


@pytest.fixture
def image(tmp_path: Path) -> str:
    return saved_picture(tmp_path / "a.png")


@pytest.mark.parametrize("marks", [False, True])
def test_an_answer_goes_to_stdout_and_statistics_to_stderr(shell: Shell, image: str, marks: bool) -> None:
    expected = vlm("llava", "llava-draft").generate("What?", [picture()])
    options = ("-m", "chain", "-i", image, *(["--marks"] if marks else []))
    result = shell("generate", *PAIR, *options, "What?")
    page = ""
    for mark, letters in groupby(zip(expected.marks, expected.text, strict=True), lambda pair: pair[0]):
        text = "".join(letter for _, letter in letters)  # one byte, one token
        page += f"‹{text}›" if marks and mark == "draft" else text
    assert (result.code, result.out) == (0, page + "\n")
    assert result.err.startswith("24 tokens in ")
    stats = expected.stats
    assert f"\n{stats.accepted_tokens} of {stats.drafted_tokens} draft tokens accepted" in result.err
    assert f"{stats.block_efficiency:.1f} tokens per pass of the target" in result.err
    assert result.err.count("\n") == 2, "libraries kept quiet"


def test_a_prediction_is_read_from_a_file(shell: Shell, image: str, tmp_path: Path) -> None:
    expected = vlm("llava", "llava-draft").generate("What?", [picture()])
    file = tmp_path / "text.txt"
    file.write_text(expected.text + "\n", "utf-8")
    result = shell("generate", *PAIR, "-i", image, "--prediction", file, "What?")
    assert (result.code, result.out) == (0, expected.text + "\n")
    assert re.search(r"\d+ of \d+ tokens copied from the prediction accepted", result.err)
    for wrong in (tmp_path / "none.txt", Path(image)):
        result = shell("generate", *PAIR, "-i", image, "--prediction", wrong, "What?")
        assert result.code != 0
        assert re.search(rf"Cannot read the prediction {wrong} .*; give a text file in UTF-8\.", result.err)
    result = shell("generate", *PAIR[:2], "-m", "plain", "--prediction", file, "What?")
    assert result.complaint.endswith("The method plain drafts from no prediction; leave --prediction out, or -m.")


@pytest.mark.parametrize(
    ("names", "options", "method"),
    [(["predicting"], [], "mtp"), (["gemma4", "gemma4-assistant"], ["-m", "chain"], "chain")],
    ids=["a checkpoint's own layer", "an assistant"],
)
def test_what_comes_with_a_target_drafts(shell: Shell, names: list[str], options: list[str], method: str) -> None:
    models = [word for flag, name in zip(("-t", "-d"), names, strict=False) for word in (flag, ready(name))]
    for sampling in ([], ["--sample", "--seed", 3]):
        asked = (*sampling, "--max-new-tokens", 12, "--json", "Hello there")
        result = shell("generate", *models, *options, *asked)
        answer = json.loads(result.out)
        assert (answer["method"], answer["lossless"]) == (method, True)
        assert answer["stats"]["drafted_tokens"] > 0
        if not sampling:
            plain = shell("generate", "-t", ready(names[0]), "-m", "plain", *asked)
            assert answer["tokens"] == json.loads(plain.out)["tokens"]


def test_a_drafter_that_falls_back_is_reported_once(
    shell: Shell, image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's attention applies to none of the pictures, and one line is printed."""

    def nothing_transferred(_: Any, prompt: Prompt, *__: Any) -> list[None]:
        for _medium in prompt.media:
            pruning._warn("its tokens lie otherwise")
        return [None] * len(prompt.media)

    monkeypatch.setattr(pruning, "_transfer_scores", nothing_transferred)
    two = ("-i", image, "-i", saved_picture(tmp_path / "b.png", 1))
    arguments = (*PAIR, "-m", "specvlm", *two, "What?")
    warning, summary, _ = shell("generate", *arguments).err.splitlines()
    assert warning.startswith("saccade: The target's attention does not apply to the drafter's visual tokens: ")
    assert warning.endswith("They are pruned evenly instead.")
    assert summary.startswith("24 tokens")


def test_json_is_one_object_with_everything(shell: Shell, image: str) -> None:
    result = shell("generate", *PAIR, "-m", "chain", "--set", "gamma=7", "-i", image, "What?", "--json")
    answer = json.loads(result.out)
    expected = vlm("llava", "llava-draft", gamma=7).generate("What?", [picture()])
    assert result.err == ""
    shown = {
        "target": str(ready("llava")),
        "drafter": str(ready("llava-draft")),
        "head": None,
        "method": "chain",
        "options": options_of("chain", {"gamma": 7}),
        "dtype": "float32",
        "draft_dtype": "float32",
        "weights": "stored",
        "executor": vlm("llava", "llava-draft").target.executor.name,
        "text": expected.text,
        "tokens": expected.tokens,
        "marks": expected.marks,
        "finish_reason": "length",
    }
    assert shown.items() <= answer.items()
    assert answer["stats"]["drafted_tokens"] == expected.stats.drafted_tokens


@pytest.mark.parametrize(
    ("arguments", "drafter", "head", "option"),
    [
        ((), draft_path(), None, {"tree": "paced", "gamma": 8}),
        (("-m", "hivis", "--set", "max_depth=3"), head_path("hivis"), "hivis", {"max_depth": 3, "top": 10}),
        (("-d", head_path("eagle2")), head_path("eagle2"), "eagle2", {"max_depth": 6}),
        (("-m", "prompt-lookup"), None, None, {"gamma": 10}),
    ],
)
def test_json_says_what_drafted_although_the_user_did_not(
    shell: Shell, arguments: tuple[Any, ...], drafter: Path | None, head: str | None, option: dict[str, int]
) -> None:
    answer = json.loads(shell("generate", "-t", "pocket", "-n", "3", *arguments, "--json", "Hello").out)
    assert (answer["drafter"], answer["head"]) == (drafter and str(drafter), head)
    assert option.items() <= answer["options"].items()
    assert set(answer["options"]) == set(METHODS[answer["method"]].options)
    assert answer["dtype"] == "float32"
    assert answer["draft_dtype"] == (drafter and "float32")


def test_an_answer_is_drafted_from_in_the_next_run_with_the_same_store(
    shell: Shell, image: str, tmp_path: Path
) -> None:
    store = ("--suffix-store", str(tmp_path / "answers.jsonl"))
    given = ("-t", ready("llava"), "-m", "suffix", *store, "-i", image, "--json", "What?")
    first, again = (json.loads(shell("generate", *given).out) for _ in range(2))
    assert again["tokens"] == first["tokens"] == vlm("llava", None).generate("What?", [picture()]).tokens
    assert again["stats"]["target_passes"] < first["stats"]["target_passes"] / 2
    assert "no option store" in shell("generate", "-t", ready("llava"), "-m", "plain", *store, "What?").err


def test_exact_mode_gives_the_tokens_of_its_plain_decoding(shell: Shell, image: str, tmp_path: Path) -> None:
    target, drafter = ("-t", ready("llava")), ("-d", ready("llava-draft"))
    given = ("--dtype", "bfloat16", "--exact", "-i", image, "-n", "12", "--json", "What?")
    plain, chain, tree = (
        json.loads(shell("generate", *target, *more, *given).out)
        for more in (("-m", "plain"), drafter, (*drafter, "-m", "dynamic-tree"))
    )
    assert (plain["exact"], plain["dtype"]) == (True, "bfloat16")
    assert plain["tokens"] == chain["tokens"] == tree["tokens"]
    assert load(ready("llava"), ready("llava-draft"), "chain", dtype="bfloat16").target.exact is False
    models = ModelSpec(str(ready("llava")), str(ready("llava-draft")), "chain", exact=True)
    write_profile(tmp_path / "own.toml", models, {})
    assert load(tmp_path / "own.toml").target.exact


@pytest.mark.parametrize(
    ("colours", "page"),
    [
        (False, "a‹bc›«de»‹f›g\n"),
        (True, "a\x1b[32mb\x1b[0m\x1b[32mc\x1b[0m\x1b[33md\x1b[0m\x1b[33me\x1b[0m\x1b[32mf\x1b[0mg\n"),
    ],
)
def test_loosened_tokens_do_not_pass_for_the_target_s_own(colours: bool, page: str) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=colours, color_system="standard" if colours else None, _environ={})
    marks: tuple[Mark, ...] = ("target", "draft", "draft", "loose", "shifted", "draft", "target")
    tokens = tuple(tokenizer().encode("abcdefg"))
    painter = screen.Painter(tokenizer(), console, marked=True)
    painter.show(Chunk("abcdefg", (tokens,), (marks,)))
    painter.finish()
    assert shown.getvalue() == page


def test_the_bracket_of_a_last_token_that_is_marked_is_closed() -> None:
    shown = io.StringIO()
    painter = screen.Painter(tokenizer(), Console(file=shown, _environ={}), marked=True)
    painter.show(Chunk("ab", (tuple(tokenizer().encode("ab")),), (("target", "draft"),)))
    painter.finish()
    assert shown.getvalue() == "a‹b›\n"


def test_the_question_may_come_from_stdin(shell: Shell) -> None:
    result = shell("generate", "-t", ready("llama"), "-", stdin="Tell me\nmore\n")
    assert result.out == vlm("llama").generate("Tell me\nmore").text + "\n"
    assert "The question is empty" in shell("generate", "-t", ready("llama"), "-", stdin="\n").complaint


def test_control_tokens_in_the_question_are_text_where_that_is_said(shell: Shell, image: str) -> None:
    arguments = ("generate", "-t", ready("llava"), "-i", image, "What </s> is <image>?")
    assert "take placeholders out" in shell(*arguments).err
    expected = vlm("llava", None).generate("What </s> is <image>?", [picture()], text_as_text=True)
    result = shell(*arguments, "--text-as-text", "-m", "plain")
    assert (result.code, result.out) == (0, expected.text + "\n")


@pytest.mark.parametrize(("argument", "given"), [(os.fsdecode(b"a \xff"), b""), ("-", b"a \xff")])
def test_a_question_that_is_no_utf_8_is_one_sentence(argument: str, given: bytes, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(given)

    def work() -> None:
        with (tmp_path / "in").open(encoding="utf-8") as sys.stdin, (tmp_path / "err").open("w") as sys.stderr:
            main(["generate", "-t", "pocket", argument])

    assert exit_code_of(work) == 2
    shown = (tmp_path / "err").read_bytes()
    assert shown == b"saccade: The text is not valid UTF-8 at character 3; give whole characters.\n"


def test_sampling_repeats_with_its_seed(shell: Shell) -> None:
    def tokens(options: str) -> list[int]:
        shown = shell("generate", "-t", ready("llama"), "--json", *options.split(), "Tell").out
        return list(json.loads(shown)["tokens"])

    sampled = tokens("--temperature 1.5 --seed 3")
    assert sampled == tokens("--temperature 1.5 --seed 3 --sample")
    assert sampled != tokens("--temperature 1.5 --seed 4")
    assert tokens("-n 5") == vlm("llama").generate("Tell").tokens[:5]


def test_temperature_0_is_greedy_whatever_the_checkpoint_says(shell: Shell, tmp_path: Path) -> None:
    """Its own generation_config.json may ask for sampling."""
    folder = shutil.copytree(ready("llama"), tmp_path / "model")
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_sample": True, "temperature": 2.0}))
    result = shell("generate", "-t", folder, "--json", "--temperature", "0", "--top-p", "0.5", "Tell")
    answer = json.loads(result.out)
    assert (answer["tokens"], answer["sampling"]) == (vlm("llama").generate("Tell").tokens, {})


def test_sampling_that_the_checkpoint_asks_for_is_said_with_what_repeats_it(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(ready("llama"), tmp_path / "model")
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.7, "max_length": 40})
    )
    shown = shell("generate", "-t", folder, "Tell")
    found = re.match(
        r"Sampling with temperature 0\.7, top-k 50, top-p 1\.0, seed (\d+); so says the checkpoint's "
        r"generation_config, --temperature 0 is greedy\.\n",
        shown.err,
    )
    assert found, shown.err
    again = shell("generate", "-t", folder, "--json", "--seed", found[1], "Tell")
    answer = json.loads(again.out)
    assert answer["text"] + "\n" == shown.out
    assert answer["sampling"] == {"temperature": 0.7, "top_k": 50, "top_p": 1.0, "seed": int(found[1])}
    assert again.err == ""
    asked = shell("generate", "-t", folder, "--sample", "--min-p", "0.1", "--seed", "2", "Tell")
    assert asked.err.startswith("Sampling with temperature 0.7, top-k 50, top-p 1.0, min-p 0.1, seed 2.\n")
    monkeypatch.setattr("builtins.input", lambda _: "/quit")
    assert "\nSampling with temperature 0.7, top-k 50" in shell("chat", "-t", folder).err
    items = tmp_path / "items.jsonl"
    items.write_text('{"prompt": "What?"}\n')
    batch = shell("batch", items, "-t", folder, "-o", tmp_path / "out.jsonl")
    assert batch.err.startswith("Sampling with temperature 0.7, top-k 50, top-p 1.0, seed 0; so says")


@pytest.mark.parametrize("given", [{}, {"do_sample": False}, {"do_sample": True, "top_k": 7, "min_p": 0.2}])
@pytest.mark.parametrize("stored", [{}, {"do_sample": True, "top_p": 0.8}])
def test_sampling_is_said_as_it_is_resolved(stored: dict[str, Any], given: dict[str, Any]) -> None:
    model = vlm("llama").target.model
    before, model.generation_config = model.generation_config, GenerationConfig(**stored)
    try:
        config, _ = model._prepare_generation_config(None, **given)
        said = sampling_of(model.generation_config, given)
    finally:
        model.generation_config = before
    assert bool(said) == config.do_sample
    assert all(getattr(config, name) == value for name, value in said.items())


@pytest.mark.parametrize(("step", "kept", "form"), [(0, 0, "json"), (0, 0, "text"), (1, 12, "json"), (2, 18, "text")])
def test_ctrl_c_keeps_what_was_generated(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, step: int, kept: int, form: str
) -> None:
    """Every step gives six tokens, the one included in which the key was pressed, unless it reads the prompt."""
    whole = vlm("llama", "llama").generate("Tell")
    steps = iter(range(100))
    stock = StepRunner.run

    def interrupted(self: StepRunner, *args: Any) -> Any:
        if next(steps) == step:
            signal.raise_signal(signal.SIGINT)
        return stock(self, *args)

    monkeypatch.setattr(StepRunner, "run", interrupted)
    arguments = ("-t", ready("llama"), "-d", ready("llama"), "-m", "chain", "Tell")
    result = shell("generate", *arguments, *(["--json"] if form == "json" else []))
    assert result.code == 130
    if form == "json":
        answer = json.loads(result.out)
        assert answer["finish_reason"] == "interrupted"
        assert answer["tokens"] == whole.tokens[:kept]
    else:
        assert result.out == whole.text[:kept] + "\n"
        assert "interrupted" in result.err


def test_a_reader_that_has_gone_is_no_error() -> None:
    """As in `python -m saccade --version | true`."""
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "saccade", "--version"]
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # so that the answer is written at the end
    process = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, env=buffered, check=False)
    os.close(theirs)
    assert process.stderr == b""
    assert process.returncode == 1


@pytest.mark.slow
def test_a_reader_that_goes_away_amid_an_answer_is_no_error() -> None:
    """As in `saccade generate ... | head -c 1`."""
    code = "import sys; from saccade.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "generate", "-t", str(ready("llama-long")), "-n", "20000", "Tell"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    assert len(process.stdout.read(1)) == 1
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1


def test_what_is_wrong_is_one_sentence_with_exit_code_2(shell: Shell, image: str, tmp_path: Path) -> None:
    llava, pair = f"-t {ready('llava')}", f"-t {ready('llava')} -d {ready('llava-draft')}"
    refused = {
        "No model is named; give a checkpoint folder or a hub id with --target": "?",
        "There is no folder": f"-t {tmp_path}/no ?",
        "does not exist; give the path of a readable file": f"{llava} -i no.png ?",
        "is on the network; download it first": f"{llava} -i https://example.com/a.png ?",
        "The video file no.mp4 does not exist": f"{llava} -v no.mp4 ?",
        "takes images but no videos": f"{llava} -v {image} ?",
        "reads text only": f"-t {ready('llama')} -i {image} ?",
        "Unknown method 'nope'": f"{llava} -m nope ?",
        "a/b'; give one that exists, or a hub id such as OWNER/NAME.": f"{llava} -d {tmp_path}/a/b -m eagle2 ?",
        "Method plain takes no drafter": f"{pair} -m plain ?",
        "Method chain needs a draft model; give one with drafter=... (--drafter": f"{llava} -m chain ?",
        "has another tokenizer than the target": f"{llava} -d {ready('llama-swapped')} ?",
        "No method has an option size; `saccade methods NAME` lists a method's options": f"{pair} --set size=3 ?",
        "Method auto has the option store (--suffix-store) with draft_with=suffix only": f"{pair} --suffix-store a ?",
        "--set takes NAME=VALUE, such as gamma=7, not 'gamma'": f"{pair} --set gamma ?",
        "--temperature 0 is greedy decoding, which --sample is not": f"{llava} --temperature 0 --sample ?",
        "(--temperature 0 on the command line, without --sample, --top-p, --top-k and --min-p)": (
            f"{pair} -m lvspec --sample ?"
        ),
        "or lower --max-new-tokens": f"{llava} -n 5000 ?",
        "The dtype 'half' is not one of auto, float32": f"{llava} --dtype half ?",
        "The device 'strange' cannot be used here": f"{llava} --device strange ?",
        "The question is empty": f"{llava} ",
    }
    if not torch.cuda.is_available():
        refused["The device 'cuda' cannot be used here"] = f"{llava} --device cuda ?"
    for words, arguments in refused.items():
        assert words in shell("generate", *arguments.split(" ")).complaint


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("-n", "0"), "--max-new-tokens must be a whole number greater than 0, not 0"),
        (("--top-k", "-1"), "--top-k must be a whole number, 0 for no limit, not -1"),
        (("--temperature", "-1"), "not -1.0; use do_sample=False for greedy (--temperature 0 on the command line)."),
        (("--stop", ""), "An empty stop string would end every answer"),
        (("--seed", "-1"), "The seed must be a whole number from 0 to"),
    ],
)
def test_values_with_which_no_model_decodes_are_refused_before_one_is_loaded(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr(screen, "load_models", None)
    items = tmp_path / "items.jsonl"
    items.write_text('{"prompt": "What?"}\n')
    llava = ready("llava")
    for command in (["generate", "What?"], ["chat"], ["batch", items, "-o", tmp_path / "out"]):
        assert words in shell(*command, "-t", llava, *given).complaint


def printed(words: list[str]) -> dict[str, Any]:
    """What a command prints on standard output and on standard error."""
    out, err, before = io.StringIO(), io.StringIO(), sys.stdout
    with redirect_stdout(out), redirect_stderr(err), suppress(SystemExit):
        main(words)
    sys.stdout = before
    return {"out": out.getvalue(), "err": err.getvalue()}


def question(picture: str, *more: str) -> list[str]:
    pair = ["-t", str(ready("llava")), "-d", str(ready("llava-draft"))]
    return ["generate", *pair, "-i", picture, "What is it?", "--json", "-n", "20", *more]


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize(
    "more",
    [("-m", "auto"), pytest.param(("-m", "dynamic-tree", "--sample", "--seed", "3"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_the_first_process_prints_the_answer_of_one_process(more: tuple[str, ...], tmp_path: Path) -> None:
    words = question(saved_picture(tmp_path / "one.png"), *more)
    alone = json.loads(printed(words)["out"])
    first, second = run_split(tmp_path, lambda _: printed([*words, "--device", "tp"]))
    answer = json.loads(first["out"])
    assert answer["tokens"] == alone["tokens"]
    assert answer["text"] == alone["text"]
    assert second["out"] == ""


def test_mistakes_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    picture = saved_picture(tmp_path / "one.png")
    assert "start the command with `torchrun" in printed([*question(picture), "--device", "tp"])["err"]
    assert "which `saccade chat` cannot use" in printed(["chat", "-t", "pocket", "--device", "tp"])["err"]
    assert "Standard input" in printed(["generate", "-t", "pocket", "--device", "tp", "-"])["err"]
