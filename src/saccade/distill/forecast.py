"""Forecast of a distillation by the target's configuration and a GPU's data sheet: memory and hours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.distill import pocket_source
from saccade.distill.options import Options
from saccade.distill.planning import Plan, Prompts, make_plan
from saccade.errors import InputError
from saccade.formats import count, duration
from saccade.sizing.lengths import LETTERS, Lengths, assumed, pictures, spread, together
from saccade.sizing.machine import Preset
from saccade.sizing.model_size import ModelSize

CHUNK = 512
"""Tokens of prompts per step, as in `saccade.engine`."""
LINE = 12
"""Bytes of an answer's token in ``answers.jsonl``: its text and its id."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast of a run."""

    preset: Preset  # the GPU
    size: ModelSize  # of the target
    lengths: Lengths  # of its prompts; answers are as long as allowed
    plan: Plan | None  # every question; None where there are no prompts yet
    options: Options  # of the run

    @property
    def memory(self) -> dict[str, float]:
        """Bytes on the GPU by what they are, for a batch of the longest prompts."""
        text, visual, _, answer = self.lengths.longest
        wide = self.size.target.text_config.intermediate_size
        return {
            "target": self.size.bytes,
            "KV cache": self.options.batch * (text + visual + answer) * self.size.entry,
            "prefill": max(visual, CHUNK) * (3 * wide + 6 * self.size.width) * self.size.each,
        }

    @property
    def seconds(self) -> float:
        """Seconds if every answer is as long as allowed, in full batches."""
        lengths, batch, size = self.lengths, self.options.batch, self.size
        prompt = lengths.text + lengths.visual
        prefill = self.preset.seconds(size.forward(prompt, lengths.patches))
        middle = prompt + lengths.answer / 2
        step = self.preset.seconds(
            batch * 2 * (size.decoder + size.lm_head),
            (size.decoder + size.lm_head) * size.each + batch * middle * size.entry,
        )
        return lengths.samples * (prefill + lengths.answer * step / batch)

    def __str__(self) -> str:
        plan, memory = self.plan, self.memory
        parts = ", ".join(f"{name} {b / 1e9:.2f}" for name, b in memory.items())
        disk = self.lengths.samples * (self.lengths.text * LETTERS + self.lengths.answer * LINE)
        return "\n".join(
            [
                f"Preset: {self.preset}",
                f"Settings: --batch {self.options.batch}",
                f"Questions: {self.lengths.samples}" if plan is None else _found(plan),
                f"Prompts: {self.lengths.text:.0f} text and {self.lengths.visual:.0f} visual tokens on average; "
                f"{self.lengths.origin}",
                f"Memory: {parts} GB; {self.preset.fits(sum(memory.values()))}",
                f"Disk: at most {disk / 1e9:.2f} GB",
                f"Time: at most {duration(self.seconds)}, if every answer has {self.options.max_new_tokens} tokens",
            ]
        )


def _found(plan: Plan) -> str:
    items = list(plan.items)
    sampled = sum(item.sampled for item in items)
    return (
        f"Questions: {len(items)} of {count(plan.conversations, 'conversation')}, "
        f"{count(len(plan.batches), 'batch', 'batches')}\nDecoding: {len(items) - sampled} greedy, {sampled} sampled\n"
        f"Left out: {count(plan.duplicates, 'duplicate')}, {count(len(plan.problems), 'unusable line')}"
    )


def forecast(
    target: str | Path,
    source: str,
    preset: Preset,
    *,
    media_root: Path | None = None,
    on_bad_line: str = "stop",
    dtype: str = "auto",
    **options: Any,
) -> Forecast:
    """Compute what `saccade.distill.distill` needs on a preset's GPU; weights are not read and need not be there."""
    if source.startswith(pocket_source.PREFIX):
        raise InputError(
            "A forecast is for prompts in a file; leave out --preset to have a pocket source planned by a few answers."
        )
    chosen = Options(**options)
    path = Path(source).expanduser()
    if not path.exists():
        size = ModelSize(target, dtype=dtype)
        lengths = assumed(size, path.name, samples=chosen.limit, answer=chosen.max_new_tokens)
        return Forecast(preset, size, lengths, None, chosen)
    prompts = Prompts(path, path.parent if media_root is None else media_root.expanduser())
    size, plan = ModelSize(target, dtype=dtype), make_plan(prompts, chosen, on_bad_line)
    return Forecast(preset, size, _lengths(prompts, plan, chosen, size), plan, chosen)


def _lengths(prompts: Prompts, plan: Plan, options: Options, size: ModelSize) -> Lengths:
    items = list(plan.items)
    seen = []
    for item in spread(items):
        history = prompts.at(item.offset).messages[: item.message + 1]
        seen.append(pictures(history, prompts.root, size))
    texts = [item.length[1] // LETTERS for item in items]
    origin = f"pictures of {len(seen)} looked at, {LETTERS} letters counted as a token"
    return together(texts, [options.max_new_tokens] * len(items), seen, origin)
