"""A session serves on after an exception, wherever in a step it came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import add, alone, engine, prompts

from checkpoints import picture, vlm
from saccade.target_model.adapter import Target
from saccade.target_model.cache import RowCache


@pytest.mark.parametrize(
    ("method", "options"),
    [("chain", {}), ("dynamic-tree", {}), ("tabed", {}), ("tabed", {"tree": "static"}), ("specvlm", {})],
    ids=["chain", "dynamic-tree", "tabed", "tabed-static", "specvlm"],
)
def test_what_was_broken_off_leaves_nothing_behind(
    method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vlm("llava", "llava-draft").using(method, **options)
    expected = model.generate("What?", [picture(1)]).tokens
    forward = Target.forward
    for at in (1, 2, 5, 10, 17):
        session, calls = model.engine.open(1), 0

        def breaking(self: Target, *given: Any, at: int = at, **named: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            logits = forward(self, *given, **named)
            if calls == at:
                raise KeyboardInterrupt
            return logits

        with monkeypatch.context() as patched:
            patched.setattr(Target, "forward", breaking)
            with pytest.raises(KeyboardInterrupt):
                model.generate("What?", [picture(1)], session=session)
        assert model.generate("What?", [picture(1)], session=session).tokens == expected


def test_a_stream_that_was_asked_for_before_serves_on_too() -> None:
    """What it needs of the session is made when it begins, not when it is asked for."""
    model = vlm("llava", "llava-draft")
    session = model.engine.open(1)
    stream = model.stream("What?", [picture(1)], session=session)

    def breaking(ids: torch.Tensor, scores: Any) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        model.generate("And?", session=session, stopping_criteria=[breaking])
    for _ in stream:
        pass
    assert stream.output.tokens == model.generate("What?", [picture(1)]).tokens


@pytest.mark.parametrize("lacking", ["reserve", "preallocate"])
@pytest.mark.parametrize("method", ["plain", "chain"])
def test_a_row_for_which_there_is_no_memory_fails_and_leaves_its_place(
    method: str, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("out of memory")

    batch = engine(method).open(2)
    running = [] if lacking == "preallocate" else [add(batch, prompts()[0])]
    batch.step()
    rows = [*running, add(batch, prompts()[1]), add(batch, prompts()[2])]
    with monkeypatch.context() as patched:
        patched.setattr(RowCache, lacking, refuse)
        stepped = [row for row, _ in batch.step()]
    failed, later = rows[:-1], rows[-1]
    assert stepped == failed, "the caches are undefined then, so rows under way fail, too"
    assert all("out of memory" in str(row.error) for row in failed)
    again = [add(batch, prompt) for prompt in prompts()[:2]]
    for _ in range(100):
        batch.step()
    assert batch.is_idle, "the slot that had been assigned is free again"
    for row, prompt in [(later, prompts()[2]), *zip(again, prompts(), strict=False)]:
        assert row.output == alone(method, prompt)
