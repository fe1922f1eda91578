"""Small suites, and methods with known faults, to see that a run notices them."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import torch

import saccade
from saccade.bench.suites import Suite, parse
from saccade.engine import Engine
from saccade.verify.lossless import Greedy


def suite(**changes: Any) -> Suite:
    """Two prompts, plain decoding and a chain, unless told otherwise."""
    content = {"tasks": ["scene"], "methods": ["chain"], "per_task": 2, "max_new_tokens": 12, "trace": 0, "warmup": 0}
    return parse({**content, **changes}, "small", "small.toml")


class Slow:
    """A drafter that sleeps before every guess."""

    def __init__(self, drafter: Any, seconds: float) -> None:
        self._drafter = drafter
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def open(self, batch: int, target: Any) -> Any:
        session = self._drafter.open(batch, target)
        return _SlowSession(session, self._seconds)


class _SlowSession:
    def __init__(self, session: Any, seconds: float) -> None:
        self._session = session
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def propose(self, *arguments: Any) -> Any:
        time.sleep(self._seconds)
        return self._session.propose(*arguments)


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


def slow(vlm: saccade.VLM, seconds: float) -> saccade.VLM:
    """The method, every step of which takes longer."""
    planted = copy.copy(vlm)
    planted.engine = Engine(vlm.target, Slow(vlm.engine.drafter, seconds))
    return planted


def wrong(vlm: saccade.VLM) -> saccade.VLM:
    """The method with one changed token per answer."""
    planted = copy.copy(vlm)
    planted.engine = _Planted(vlm.target, vlm.engine.drafter)
    return planted
