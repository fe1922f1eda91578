"""A conversation's videos stay as the turn that showed them has sampled them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from checkpoints import vlm
from saccade import InputError


def film(path: Path, frames: int = 48) -> str:
    """A clip of 8 frames a second that grows lighter."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for shade in range(frames):
            pixels = np.full((64, 64, 3), 4 * shade, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return str(path)


@pytest.mark.parametrize("drafter", [None, "qwen-draft"])
@pytest.mark.parametrize("sampling", [{}, {"num_frames": 4}, {"fps": 1.0}], ids=["own", "frames", "rate"])
def test_later_turns_reuse_a_video_and_need_its_file_no_more(
    sampling: dict[str, Any], drafter: str | None, tmp_path: Path
) -> None:
    model = vlm("qwen", drafter)
    chat, first = model.chat(), film(tmp_path / "first.mp4")
    alone = model.generate("What moves?", videos=[first], **sampling)
    said = chat.send("What moves?", videos=[first], **sampling)
    assert said.tokens == alone.tokens
    assert said.stats.prompt_tokens == alone.stats.prompt_tokens
    Path(first).unlink()
    for words, videos, options in (
        ("And what colour?", [], {}),
        ("And here?", [film(tmp_path / "second.mp4", 24)], {"num_frames": 6}),
        ("Sure?", [], {"fps": 3.0}),
    ):
        held = said.stats.prompt_tokens
        said = chat.send(words, videos=videos, **options)
        assert said.stats.reused_tokens > held
        assert said.tokens == vlm("qwen", method="plain").generate(chat.messages[:-1]).tokens


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen", {"num_frames": 4, "fps": 1.0}, "give one of them"),
        ("qwen", {"num_frames": -1}, "give a number above 0"),
        ("llava", {}, "no videos"),
        ("llama", {}, "reads text only"),
    ],
)
def test_a_video_that_cannot_be_taken_is_refused_for_its_own_reason(
    name: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    chat = vlm(name).chat()
    with pytest.raises(InputError, match=message):
        chat.send("What moves?", videos=[film(tmp_path / "film.mp4", 8)], **options)
    assert chat.messages == []
