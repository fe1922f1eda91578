"""Engines, prompts and forwards for tests of the running batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

import harness
from harness import drain
from saccade.engine import Engine, Request, Row, RunningBatch
from saccade.engine.row import plan
from saccade.inputs.families.family import Prompt

METHODS = ("plain", "lookup", "chain", "static")


def engine(method: str, family: str = "llama") -> Engine:
    return harness.engine(family, method)


@cache
def prompts(kind: str = "text", family: str = "llama") -> list[Prompt]:
    """Of different lengths."""
    return harness.prompts_of(family, kind, rows=4)


def add(
    batch: RunningBatch, prompt: Prompt, seed: int = 0, n: int = 20, draft: Prompt | None = None, **options: Any
) -> Row:
    """A row with options of its own, as of `generate`."""
    (decoding,) = plan(batch.target, [prompt], max_new_tokens=n, **options)
    return batch.add(Request(prompt, draft, seed=seed), decoding)


def alone(method: str, prompt: Prompt, family: str = "llama", **options: Any) -> list[int]:
    """Tokens of the same request in a batch of its own."""
    batch = engine(method, family).open(1)
    row = add(batch, prompt, **options)
    drain(batch)
    if row.error is not None:
        raise row.error
    return row.output


class Forwards:
    """The blocks of every forward of a batch's target."""

    def __init__(self, batch: RunningBatch, patched: pytest.MonkeyPatch) -> None:
        self.passes: list[list[Any]] = []
        run = batch.context.run

        def counted(blocks: Sequence[Any]) -> Any:
            self.passes.append(list(blocks))
            return run(blocks)

        patched.setattr(batch.context, "run", counted)

    @property
    def rows(self) -> list[int]:
        """Of every forward, how many rows took part."""
        return [sum(len(block.rows) for block in blocks) for blocks in self.passes]
