"""The lines below an answer: tokens, drafts, and the time saved over plain decoding, which is timed after it."""

from __future__ import annotations

import re
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from commands import Shell

from checkpoints import ready, vlm
from saccade.cli.account import CONTEXT, PASSES, account, plain_pass
from saccade.engine.step import StepRunner
from saccade.output import Output, Stats, Times
from saccade.vlm import VLM

PAIR = ("-t", ready("llava"), "-d", ready("llava-draft"), "-m", "chain")
SAVED = re.compile(rf"about \d+\.\d\d s (saved|lost), \d+\.\d times plain decoding's speed \({PASSES} passes of it")


def answer(**counts: Any) -> Output:
    """41 tokens that took 2 s, half of it after the target's prefill: 0.75 s, and 0.25 s of the drafter's."""
    stats = {"prompt_tokens": 30, "new_tokens": 41, "prefill_tokens": 1, "target_passes": 16}
    drafted = {"drafted_tokens": 40, "accepted_tokens": 25}
    times = Times(vision=0.5, prefill=0.5, draft_prefill=0.25, verify=0.5, draft=0.25, total=2.0)
    return Output(finish_reason="eos", stats=Stats(**{**stats, **drafted, **counts}, times=times))


@pytest.mark.parametrize(
    ("outputs", "plain", "lines"),
    [
        (
            [answer()],
            0.1,  # of which 40 are needed
            "41 tokens in 2.00 s · 53 tokens/s after prefill · method chain · complete\n"
            "25 of 40 draft tokens accepted (62%) · 2.5 tokens per pass of the target · "
            "about 3.00 s saved, 4.0 times plain decoding's speed (7 passes of it timed)",
        ),
        (
            [answer(reused_tokens=20), answer(accepted_tokens=15, loosened_tokens=2)],
            0.02,
            "82 tokens in 4.00 s · 20 of 60 prompt tokens reused · 53 tokens/s after prefill · "
            "method chain · 2 answers\n"
            "40 of 80 draft tokens accepted (50%), 2 of them loosely · 2.5 tokens per pass of the target · "
            "about 0.40 s lost, 0.8 times plain decoding's speed (7 passes of it timed)",
        ),
        (
            [answer(drafted_tokens=1, accepted_tokens=0)],
            None,
            "41 tokens in 2.00 s · 53 tokens/s after prefill · method chain · complete\n"
            "0 of 1 draft token accepted (0%) · 2.5 tokens per pass of the target",
        ),
        (
            [answer(drafted_tokens=0, accepted_tokens=0)],
            0.1,
            "41 tokens in 2.00 s · 53 tokens/s after prefill · method chain · complete",
        ),
    ],
    ids=["saved", "lost in two answers", "not timed", "nothing drafted"],
)
def test_an_account_is_words_for_measured_numbers(outputs: list[Output], plain: float | None, lines: str) -> None:
    assert account(outputs, "chain", plain) == lines


def test_plain_decoding_is_timed_on_the_answers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(0.0, 0.5)
    monkeypatch.setattr("saccade.cli.account.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    asked: list[Any] = []
    stock = VLM.stream

    def stream(self: VLM, prompt: Any, **options: Any) -> Any:
        asked.append((self.method, prompt, options["do_sample"]))
        return stock(self, prompt, **options)

    model = vlm("llava", "llava-draft")
    output = model.generate("Tell", max_new_tokens=100)
    monkeypatch.setattr(VLM, "stream", stream)
    options = {"do_sample": True, "stop_strings": ["a"], "max_new_tokens": 100}
    assert plain_pass(model, options, answer(drafted_tokens=0)) is None
    assert not asked
    assert plain_pass(model, options, output) == 0.5
    assert [(name, prompt.ids, sampled) for name, prompt, sampled in asked] == [
        ("plain", tuple(output.tokens[-CONTEXT:]), True)
    ]
    assert next(clock) == 0.5 * (PASSES + 1)


def test_generate_tells_the_time_saved(shell: Shell) -> None:
    assert SAVED.search(shell("generate", *PAIR, "--stop", "zzz", "Tell").err)


def test_ctrl_c_while_plain_decoding_is_timed_leaves_the_answer(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = StepRunner.run

    def interrupted(self: StepRunner) -> None:
        if self._state.drafting is None:
            raise KeyboardInterrupt
        stock(self)

    monkeypatch.setattr(StepRunner, "run", interrupted)
    result = shell("generate", *PAIR, "Tell")
    assert (result.code, result.out) == (0, vlm("llava", None).generate("Tell").text + "\n")
    assert result.err.splitlines()[1].endswith("tokens per pass of the target")


def test_json_times_nothing_else(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(VLM, "using")
    assert shell("generate", *PAIR, "--json", "Tell").code == 0


def test_a_chat_adds_up_its_answers(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    stock = VLM.using
    monkeypatch.setattr(VLM, "using", lambda self, method: used.append(method) or stock(self, method))
    lines = ["/stats", "One?", "Two?", "/stats", "/reset", "/stats"]
    nothing, _, _, *notes = shell("chat", *PAIR, stdin="\n".join(lines)).err.splitlines()[1:]
    talk = vlm("llava", "llava-draft").chat()
    first, second = talk.send("One?").stats, talk.send("Two?").stats
    assert nothing == notes[-1] == "No answer yet."
    assert notes[2].startswith(f"{first.new_tokens + second.new_tokens} tokens in ")
    assert notes[2].endswith("2 answers")
    accepted, drafted = (first.accepted_tokens + second.accepted_tokens, first.drafted_tokens + second.drafted_tokens)
    assert notes[3].startswith(f"{accepted} of {drafted} draft tokens accepted")
    assert SAVED.search(notes[3])
    assert used == ["plain"], "timed once"
