"""The side of an engine's process: requests and answers as lines of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

Answer = Callable[[int, str, int], tuple[list[int], int]]
"""Answer a prompt by number in a way, with at most so many tokens: new token ids, and passes of the target.

An answer of one token is made without the draft model, whose reading of the prompt counts as drafting."""


def serve(answer: Answer, about: str) -> None:
    """Say what engine this is, then answer requests until there are no more."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print
    print(json.dumps(about), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        processor, wall = time.process_time(), time.perf_counter()
        tokens, passes = answer(**request)
        spent = {"processor": time.process_time() - processor, "wall": time.perf_counter() - wall}
        print(json.dumps({"tokens": tokens, "passes": passes, **spent}), file=replies, flush=True)
