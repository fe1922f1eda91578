"""`saccade chat`: turns, files, commands and keys; models of `saccade serve`."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path

import pytest
from commands import Shell

from checkpoints import picture, ready, saved_picture, vlm
from processes import forked_behind_a_terminal
from saccade.cli import main

LLAVA = ("chat", "-t", ready("llava"), "-d", ready("llava-draft"))


def test_a_conversation_with_images_goes_on_through_mistakes(shell: Shell, tmp_path: Path) -> None:
    talk = vlm("llava", "llava-draft").chat("Be short.")
    first, second = saved_picture(tmp_path / "first.png", 1), saved_picture(tmp_path / "b c.png", 2)
    answers = [
        talk.send("What is it?", [picture(1)]).text,
        talk.send("And this?", [picture(2)]).text,
        talk.send("Sure?").text,
    ]
    lines = [
        "/help",
        f"/image {first}",
        "What is it?",
        "/image no.png",
        "/image",
        "/nonsense",
        "",
        f"/image '{second}'",
        "And this?",
        "x" * 2000,
        "Sure?",
        "/quit",
        "never read",
    ]
    result = shell(*LLAVA, "--system", "Be short.", stdin="\n".join(lines))
    assert result.code == 0
    assert result.out.splitlines() == answers
    for words in (
        "/reset        start a new conversation",
        f"{first} is attached to your next message.",
        "The image file no.png does not exist",
        "/image needs a file, such as /image holiday.jpg.",
        "/nonsense is not a command; /help lists the commands.",
        "prompt tokens reused",
        "this model's context is 1024",
    ):
        assert words in result.err


@pytest.mark.parametrize(
    ("options", "warnings"), [(["--dtype", "bfloat16"], 1), (["--dtype", "bfloat16", "--exact"], 0)]
)
def test_a_chat_in_bfloat16_says_once_what_may_change_an_answer(
    shell: Shell, options: list[str], warnings: int
) -> None:
    result = shell(*LLAVA, *options, stdin="Why?\nHow?\n/quit")
    assert result.code == 0
    assert result.err.count("In bfloat16") == result.err.count("exact mode (--exact) prevents that") == warnings


def test_a_reset_forgets_everything_but_the_system_message(shell: Shell, tmp_path: Path) -> None:
    model = vlm("llava", "llava-draft")
    expected = [model.chat("Rhyme.").send(words).text for words in ("One?", "Two?")]
    image = saved_picture(tmp_path / "a.png")
    lines = ["One?", f"/image {image}", "/reset", "Two?"]
    result = shell(*LLAVA, "--system", "Rhyme.", stdin="\n".join(lines))
    assert result.out.splitlines() == expected
    assert "A new conversation." in result.err


def test_files_of_a_message_that_does_not_fit_are_dropped(shell: Shell, tmp_path: Path) -> None:
    """Or every later message would fail like it."""
    image = saved_picture(tmp_path / "a.png")
    result = shell("chat", "-t", ready("llama"), stdin=f"/image {image}\nWhat?\nAnd?\n")
    assert "reads text only" in result.err
    assert result.out == vlm("llama").chat().send("And?").text + "\n"


def test_a_bad_first_image_is_reported_before_the_model_is_loaded(shell: Shell) -> None:
    assert "no.png does not exist" in shell(*LLAVA, "-i", "no.png").complaint


class Terminal:
    """A command that believes to be in front of a person."""

    def __init__(self, *arguments: object) -> None:
        def work() -> None:
            os.environ.update(TERM="xterm", NO_COLOR="1")
            main([str(a) for a in arguments])

        self._process, self._ours = forked_behind_a_terminal(work)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def read_until(self, words: str) -> str:
        """Everything shown up to these words (waits for them; pytest's timeout ends a wait in vain)."""
        shown = b""
        while words.encode() not in shown:
            shown += os.read(self._ours, 1)
        return shown.decode()

    def press_until(self, key: str, words: str) -> None:
        """Press a key again and again until these words show.

        An interrupt that comes between Python's prompt and its wait for keys is only seen with the next key.
        """
        shown = b""
        while words.encode() not in shown:
            self.type(key)
            while words.encode() not in shown and select.select([self._ours], [], [], 1.0)[0]:
                shown += os.read(self._ours, 1)

    def leave(self, key: str) -> int:
        """Press a key until the command has ended; its exit code."""
        while (ended := os.waitpid(self._process, os.WNOHANG)) == (0, 0):
            self.type(key)
            if select.select([self._ours], [], [], 1.0)[0]:
                with contextlib.suppress(OSError):  # how Linux tells that the other side is closed
                    os.read(self._ours, 1000)
        os.close(self._ours)
        return os.waitstatus_to_exitcode(ended[1])


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves() -> None:
    drafted = ("-d", ready("llama-long"))
    terminal = Terminal("chat", "-t", ready("llama-long"), *drafted, "-m", "chain", "-n", "20000", "--marks")
    terminal.read_until("> ")
    terminal.type("Tell me everything\n")
    shown = terminal.read_until("›")
    assert "‹" in shown.splitlines()[-1], "NO_COLOR asks for marks that are no colours"
    terminal.type("\x03")
    terminal.read_until("interrupted")
    terminal.read_until("> ")
    terminal.type("And then\n")
    terminal.read_until("›")
    terminal.type("\x03")
    assert "prompt tokens reused" in terminal.read_until("interrupted")
    terminal.read_until("> ")
    terminal.press_until("\x03", "Ctrl-D leaves.")
    assert terminal.leave("\x04") == 0


def test_a_model_is_named_once(shell: Shell) -> None:
    assert "No model is named" in shell("serve").err
    assert "--replicas is for engines on Ray" in shell("serve", "-t", "pocket", "--replicas", "2", "--plan").complaint
    assert "the models of x.toml have their own" in shell("serve", "-t", "pocket", "--config", "x.toml").err
