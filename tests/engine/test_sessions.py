"""Who may use a session, and what becomes of a generation that another one overtakes in it."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints import picture, vlm
from saccade import InputError

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("chain", {"gamma": 2}),
    ("dynamic-tree", {}),
    ("fly", {"entropy": 0.0, "deferred": 0}),
    ("random-loosening", {"share": 1.0}),
]


@pytest.mark.parametrize(("method", "options"), METHODS, ids=[name for name, _ in METHODS])
def test_a_session_of_another_method_is_refused(method: str, options: dict[str, Any]) -> None:
    """Its judges could be lossy, its drafter's trees larger than the caches were made for."""
    lossless = vlm("llava", "llava-draft")
    for opened, asked in (
        (lossless.using(method, **options), lossless),
        (lossless, lossless.using(method, **options)),
    ):
        with pytest.raises(InputError, match="opened with another method"):
            asked.generate("What?", [picture(1)], session=opened.engine.open(1))


def test_a_session_of_another_model_is_refused() -> None:
    session = vlm("llava", method="plain").engine.open(1)
    with pytest.raises(InputError, match="another model"):
        vlm("qwen", method="plain").generate("What?", session=session)


def test_a_session_of_the_same_engine_serves_greedy_and_sampled_turns() -> None:
    model = vlm("llava", "llava-draft")
    session = model.engine.open(1)
    for do_sample in (True, False, True):
        options = {"do_sample": do_sample, "seed": 3}
        alone = model.generate("What?", [picture(1)], **options)
        assert model.generate("What?", [picture(1)], session=session, **options).tokens == alone.tokens
