"""Letting a VLM answer pocket questions, many at a time."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from saccade.pocket.sample import Sample

LONGEST_ANSWER = 160


def messages(sample: Sample) -> list[dict[str, Any]]:
    """The sample's question as Hugging Face chat messages."""
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": sample.question}]}]


@torch.no_grad()
def answer(
    model: Any,
    processor: Any,
    samples: Sequence[Sample],
    *,
    images: Sequence[Image.Image] | None = None,
    temperature: float = 0.0,
    batch: int = 64,
) -> list[list[int]]:
    """The model's answers as token ids, without the end token.

    Args:
        images: pictures to show in the place of the samples' own.
        temperature: 0 for greedy answers.

    Returns:
        One list of ids per sample, in their order.
    """
    shown = [sample.image for sample in samples] if images is None else list(images)
    order = sorted(range(len(samples)), key=lambda i: (samples[i].task, len(samples[i].answer)))
    answers: list[list[int]] = [[] for _ in samples]
    stop = processor.tokenizer.eos_token_id
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0}
    sampling = sampled if temperature > 0 else {"do_sample": False}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        texts = [
            processor.apply_chat_template(messages(samples[i]), add_generation_prompt=True) for i in chosen
        ]
        inputs = processor(text=texts, images=[[shown[i]] for i in chosen], padding=True, return_tensors="pt")
        inputs = inputs.to(model.device, dtype=model.dtype)
        written = model.generate(**inputs, **sampling, max_new_tokens=LONGEST_ANSWER)
        for i, row in zip(chosen, written[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            answers[i] = row[: row.index(stop)] if stop in row else row
    return answers
