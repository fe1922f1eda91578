"""Forecast of a distillation by the target's configuration and a GPU's memory: bytes on the GPU and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saccade.distill import planning
from saccade.distill.planning import Options, Prompts, make_plan
from saccade.errors import InputError
from saccade.memory_plan import LETTERS, ModelSize, Preset, assumed, pictures, spread, together
from saccade.wording import count

CHUNK = 512
"""Tokens of prompts per step, as in `saccade.engine`."""
LINE = 12
"""Bytes of an answer's token in ``answers.jsonl``: its text and its id."""


def forecast(
    target: str | Path,
    source: str,
    preset: Preset,
    *,
    media_root: Path | None = None,
    on_bad_line: str = "stop",
    dtype: str = "auto",
    **options: Any,
) -> tuple[str, list[str]]:
    """Compute what `saccade.distill.distill` needs on a preset's GPU; weights are not read and need not be there.

    Returns lines of text, and a sentence per line of the prompts that cannot be used.
    """
    if source.startswith(planning.PREFIX):
        raise InputError(
            "A forecast is for prompts in a file; leave out --preset to have a pocket source planned by a few answers."
        )
    chosen, path = Options.checked(on_bad_line, options), Path(source).expanduser()
    size = ModelSize(target, dtype=dtype)
    problems: list[str] = []
    if path.exists():
        prompts = Prompts(path, path.parent if media_root is None else media_root.expanduser())
        plan = make_plan(prompts, chosen, on_bad_line)
        problems = plan.problems
        seen = [
            pictures(prompts.at(question.offset).messages[: question.message + 1], prompts.root, size)
            for question in spread(plan.questions)
        ]
        texts = [question.length[1] // LETTERS for question in plan.questions]
        origin = f"pictures of {len(seen)} looked at, {LETTERS} letters counted as a token"
        lengths = together(texts, [chosen.max_new_tokens] * len(texts), seen, origin)
        sampled = sum(question.sampled for question in plan.questions)
        questions = (
            f"Questions: {len(texts)} of {count(plan.conversations, 'conversation')}, "
            f"{count(len(plan.batches), 'batch', 'batches')}\n"
            f"Decoding: {len(texts) - sampled} greedy, {sampled} sampled\n"
            f"Left out: {count(plan.duplicates, 'duplicate')}, {count(len(problems), 'unusable line')}"
        )
    else:
        lengths = assumed(size, path.name, samples=chosen.limit, answer=chosen.max_new_tokens)
        questions = f"Questions: {lengths.samples}"
    text, visual, _, answer = lengths.longest
    wide = size.target.text_config.intermediate_size
    memory = {
        "target": size.bytes,
        "KV cache": chosen.batch * (text + visual + answer) * size.entry,
        "prefill": max(visual, CHUNK) * (3 * wide + 6 * size.width) * size.each,
    }
    parts = ", ".join(f"{name} {b / 1e9:.2f}" for name, b in memory.items())
    disk = lengths.samples * (lengths.text * LETTERS + lengths.answer * LINE)
    lines = [
        f"Preset: {preset}",
        f"Settings: --batch {chosen.batch}",
        questions,
        f"Prompts: {lengths.text:.0f} text and {lengths.visual:.0f} visual tokens on average; {lengths.origin}",
        f"Memory: {parts} GB; {preset.fits(sum(memory.values()))}",
        f"Disk: at most {disk / 1e9:.2f} GB, if every answer has {chosen.max_new_tokens} tokens",
    ]
    return "\n".join(lines), problems
