"""Small suites, and methods with known faults, to see that a run notices them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

import saccade
from saccade.bench.suites import Suite, parse
from saccade.engine import Engine
from saccade.verify.rule import Greedy


def suite(**changes: Any) -> Suite:
    """Two prompts, plain decoding and a chain, unless told otherwise."""
    content = {"tasks": ["scene"], "methods": ["chain"], "per_task": 2, "max_new_tokens": 12, "trace": 0, "warmup": 0}
    return parse({**content, **changes}, "small", "small.toml")


class WrongToken(Greedy):
    """Greedy, but the third verdict of every answer says the next id instead of the right one."""

    def __init__(self) -> None:
        self._verdicts = 0

    def judge(self, *arguments: Any) -> Any:
        verdict = super().judge(*arguments)
        self._verdicts += 1
        if self._verdicts == 3:
            verdict = replace(verdict, token=torch.where(verdict.token > 200, verdict.token - 1, verdict.token + 1))
        return verdict


class _Planted(Engine):
    def rule(self, do_sample: bool) -> Any:
        return WrongToken()


def wrong(vlm: saccade.VLM) -> saccade.VLM:
    """The method with one changed token per answer."""
    planted = copy.copy(vlm)
    planted.engine = _Planted(vlm.target, vlm.engine.drafter)
    return planted
