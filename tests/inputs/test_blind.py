"""A prompt for a drafter without eyes: one newline for every image, and nothing of its wrapping."""

from __future__ import annotations

import pytest
from kits import VIDEO, VISUAL, kit
from test_same_as_transformers import clip, picture, user


@pytest.mark.parametrize("size", [(40, 30), (400, 500)], ids=str)
@pytest.mark.parametrize("name", VISUAL)
def test_every_image_becomes_one_newline(name: str, size: tuple[int, int]) -> None:
    k = kit(name)
    prompt = k.ours.prompt(
        user("Compare", {"type": "image"}, "with", {"type": "image"}, {"type": "image"}, "now."),
        [picture(*size), picture(64, 130), picture(28, 28)],
    )
    blind = k.ours.text_only(prompt)
    assert blind.media == ()
    special = set(k.ours.tokenizer.all_special_tokens) - {
        "<s>",
        "<|im_start|>",
        "<|im_end|>",
        "<end_of_utterance>",
    }
    text = k.ours.tokenizer.decode(blind.ids)
    assert not [token for token in special if token in text]
    template = k.ours.parts.chat_template
    empty = {"gemma3": "\n\n\n\n\n", "internvl": "\n\n"}.get(name, "\n")  # what template and family write around
    if "selectattr" in template:
        assert text.count("\n") == 6
    else:
        assert f"Compare{empty}with{empty}{empty}now." in text


@pytest.mark.parametrize("name", [n for n in VIDEO if n not in ("internvl", "smolvlm")])
def test_every_video_becomes_one_newline_with_its_timestamps(name: str) -> None:
    k = kit(name)
    video = clip(8, 60, 45, 4.0)
    prompt = k.ours.prompt(user("Before", {"type": "video"}, {"type": "video"}, "after."), videos=[video, video])
    text = k.ours.tokenizer.decode(k.ours.text_only(prompt).ids)
    assert "seconds" not in text
    assert "<|vision" not in text
    assert "Before\n\nafter." in text or text.startswith("USER: \n\n\n\nBefore after.")


@pytest.mark.parametrize("name", VISUAL)
def test_text_without_media_stays_as_it_is(name: str) -> None:
    prompt = kit(name).ours.prompt("Only words.")
    assert kit(name).ours.text_only(prompt) == prompt
