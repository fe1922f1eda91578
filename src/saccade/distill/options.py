"""Options that determine the answers of a run; a resumed run must repeat them."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

from saccade.errors import InputError
from saccade.typed import check_whole

FIRST_SEED = 1_000_000
"""Pocket samples for training are drawn from here on; evaluation, benchmarks and the demo draw below."""


@dataclass(frozen=True, slots=True)
class Options:
    """Choice of questions and decoding."""

    sampled_share: float = 0.5  # share of the questions answered by sampling; the others are answered greedily
    temperature: float = 1.0  # of the sampled answers, whose distribution is cut nowhere (no top-p, no top-k)
    max_new_tokens: int = 256  # longest answer
    batch: int = 8  # questions per batch
    seed: int = 0  # decides which questions are sampled, and their draws
    history: str = "reference"  # content of earlier assistant turns
    limit: int | None = None  # number of questions, the first ones; None for all
    count: int = 1000  # of a pocket source, samples of every task
    first_seed: int = FIRST_SEED  # of a pocket source, number of the first sample
    grammar: str = "dense"  # of a pocket source, `dense` or `verbose`

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch", "count", "limit"):
            value = getattr(self, name)
            if name == "limit" and value is None:
                continue
            check_whole(value, 1, name, error=InputError)
        if not 0 <= self.sampled_share <= 1:
            raise InputError(f"sampled_share must be from 0 (all greedy) to 1, not {self.sampled_share}.")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise InputError(
                f"temperature must be above 0, not {self.temperature}; for greedy answers set sampled_share to 0 "
                "(--sampled-share 0 on the command line)."
            )
        if self.history not in ("reference", "own"):
            raise InputError(f"history must be reference or own, not {self.history!r}.")
        if self.first_seed < FIRST_SEED:
            raise InputError(
                f"first_seed must be at least {FIRST_SEED}, not {self.first_seed}; evaluation draws below."
            )

    def samples(self, item: str) -> bool:
        """Whether the question of that id is answered by sampling."""
        return _number(f"{self.seed}/share/{item}") < self.sampled_share * 2**63

    def seed_of(self, item: str) -> int:
        """Return the seed of a question's random generator: a function of its id, equal in every attempt."""
        return _number(f"{self.seed}/draws/{item}")

    def decoding(self, sampled: bool) -> dict[str, Any]:
        """Arguments of `saccade.VLM.generate`; the checkpoint's own penalties stay."""
        if not sampled:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": True,
            "temperature": float(self.temperature),
            "top_k": 0,
            "top_p": 1.0,
        }


def _number(words: str) -> int:
    """Hash words to a number from 0 to 2**63 - 1, equal on every machine."""
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest()) >> 1
