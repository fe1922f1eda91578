"""Letting a pocket model answer samples, many at a time, on the engine."""

from collections.abc import Callable, Sequence
from typing import Any

from saccade.pocket.sample import WORLD, Sample
from saccade.vlm import VLM


def answer(
    vlm: VLM,
    samples: Sequence[Sample],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 32,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """The model's answers as token ids, without the end token, in the order of the samples.

    Args:
        temperature: 0 for greedy answers.
        seed: of the draws, when it is not.
        progress: told how many samples are done, after every batch.
    """
    # Rows of one batch stop together when their true answers are of one length.
    order = sorted(range(len(samples)), key=lambda i: (samples[i].task, len(samples[i].answer)))
    answers: list[list[int]] = [[] for _ in samples]
    sampling: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {}
    )
    end = vlm.processor.tokenizer.eos_token_id
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        outputs = vlm.generate(
            [samples[i].messages() for i in chosen],
            seed=[seed + i for i in chosen],
            max_new_tokens=max(WORLD[samples[i].task].longest for i in chosen),
            **sampling,
        )
        for i, output in zip(chosen, outputs, strict=True):
            answers[i] = [token for token in output.tokens if token != end]
        progress(start + len(chosen))
    return answers
