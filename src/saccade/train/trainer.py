"""The loop: features, drafts, loss, step; checkpoints, measurements and the log beside it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

from saccade.draft.heads.store import save_head
from saccade.errors import TrainingError
from saccade.target.adapter import Target
from saccade.train.beginning import new_head
from saccade.train.checkpoint import Checkpoints
from saccade.train.dream_feeding import new_feeder
from saccade.train.entries import Entries
from saccade.train.feeding import lm_head_of, new_cache
from saccade.train.folders import recover, write_folder
from saccade.train.identity import identity
from saccade.train.log import Log
from saccade.train.losses import Tally
from saccade.train.optimiser import Optimiser, rate_at
from saccade.train.order import Order
from saccade.train.processes import Processes
from saccade.train.recipe import PACE, Recipe, Stage
from saccade.train.samples import Source
from saccade.train.sums import parted, summed
from saccade.train.validate import EngineMeasure, Measure


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left.

    Attributes:
        head: folder of the head after the last step.
        best: folder of the head whose drafts were accepted longest; None where that was never measured.
        efficiency: its block efficiency.
    """

    head: Path
    best: Path | None
    efficiency: float | None


class Trainer:
    """One run, from its first step or from its last checkpoint.

    Args:
        target: the teacher. Its weights are frozen, which is left so.
        recipe: all numbers.
        source: samples.
        out: folder of checkpoints, log, ``best`` and ``head``.
        measure: what tells which head is best; block efficiency on samples kept apart when None.
        resume: whether to go on from a checkpoint in ``out``.
        say: takes lines of progress.

    Attributes:
        order: which samples make up which step.
        apart: numbers of the samples that are measured on, and not learnt from.

    Raises:
        TrainingError: the data are too few.
        ModelError: the kind of head has no such option.
    """

    def __init__(
        self,
        target: Target,
        recipe: Recipe,
        source: Source,
        out: Path,
        *,
        measure: Measure | None = None,
        resume: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        self.target, self.recipe, self.processes = target, recipe, Processes()
        self._source, self._out = source, Path(out)
        self._say = say if self.processes.leads else _silent
        target.model.requires_grad_(False)
        self.head = new_head(target, recipe)
        self._optimiser = Optimiser(self.head, recipe)
        self._lm_head, self._objective = lm_head_of(target), recipe.objective
        apart, chosen = _set_apart(len(source.lengths), recipe)
        self.order = Order(source.lengths, chosen, recipe.batch_size, recipe.seed)
        self.apart, self._measure = apart, measure
        about = self._about()
        self._checkpoints = Checkpoints(self._out / "checkpoints", about)
        cache = new_cache(
            recipe.feature_cache,
            target,
            recipe.cache_gb * 1e9,
            self._out / "features" / str(self.processes.rank),
            json.dumps(
                [about["target"], about["data"], list(self.head.layers), recipe.max_tokens, *self._wanted()]
            ),
            self._say,
        )
        rank = self.processes.rank
        self.feeder = new_feeder(
            target, self.head, source, cache, self._objective, self._out / "calibration", rank
        )
        self._step, self._best = 0, -math.inf
        self._resume = resume

    def run(self) -> Outcome:
        """Train to the end.

        Raises:
            TrainingError: the folder holds checkpoints and none is to be gone on from, or those of another run; a loss
                is not a number; the disk is full; or a line of the data is bad and that is to stop.
        """
        self._restore()
        log = Log(self._out, self._step, self.recipe.steps, self._say) if self.processes.leads else None
        begun = time.monotonic()
        for step in range(self._step, self.recipe.steps):
            values = self.train_step(step)
            self._step = step + 1
            if log is not None and (self._due(self.recipe.log_every) or self._step == self.recipe.steps):
                values["seconds"] = round(time.monotonic() - begun, 3)
                log.write(self._step, values)
                log.progress(self._step, f"loss {values['loss']:.4f}")
            if self._due(self.recipe.validate_every) or self._step == self.recipe.steps:
                self._validate(log)
            if self._due(self.recipe.checkpoint_every) or self._step == self.recipe.steps:
                self._save()
        if self.feeder.cache is not None:
            self.feeder.cache.flush()
            self._say(f"features kept: {self.feeder.cache}")
        if log is not None:
            log.close()
            write_folder(self._out / "head", lambda part: save_head(self.head, part))
        self.processes.wait()
        best = self._out / "best" if self._best > -math.inf else None
        return Outcome(self._out / "head", best, self._best if best else None)

    def train_step(self, step: int) -> dict[str, Any]:
        """One update of the weights.

        Returns:
            Means over the step's examples, for the log.
        """
        number, stage, within = self.recipe.at(step)
        mine = self.order.at(step)[self.processes.rank :: self.processes.count]
        tallies = [
            self._backward(mine[i : i + self.recipe.micro_batch], stage, step)
            for i in range(0, len(mine), self.recipe.micro_batch)
        ]
        sums = summed(
            [t for t in tallies if t is not None], stage.draft_steps, self._names(), self.target.device
        )
        sums = self.processes.sum(sums)
        self.processes.sum_gradients(self._optimiser.weights)
        loss, terms, (kept, tried, right) = parted(sums, stage.draft_steps)
        if not math.isfinite(loss):
            raise TrainingError(
                f"The loss is {loss} at step {step + 1}; its batch is in {self._out}/bad-step-{step + 1}. Go on from "
                "the last checkpoint with a lower rate or a smaller clip, in another --out folder."
            )
        examples, rate, norm = sum(kept), rate_at(stage, within), 0.0
        if examples:
            for weight in self._optimiser.weights:
                if weight.grad is not None:
                    weight.grad /= examples
            norm = self._optimiser.step(rate)
        else:
            self._optimiser.clear()
        if not math.isfinite(norm):
            raise TrainingError(
                f"The gradient is {norm} at step {step + 1} though the loss is {loss / examples}; lower the rate."
            )
        mean = max(examples, 1)
        return {
            "stage": number,
            "loss": loss / mean,
            **{name: value / mean for name, value in zip(self._names(), terms, strict=True)},
            "rate": rate,
            "gradient": norm,
            "examples": kept,
            "agreement": [r / t if t else 0.0 for r, t in zip(right, tried, strict=True)],
        }

    def try_step(self, step: int, stage: Stage) -> None:
        """The work of a step as if in this stage, without its update."""
        for start in range(0, self.recipe.batch_size, self.recipe.micro_batch * self.processes.count):
            mine = self.order.at(step)[start + self.processes.rank :: self.processes.count]
            self._backward(mine[: self.recipe.micro_batch], stage, step)
        self._optimiser.clear()

    def _backward(self, indices: list[int], stage: Stage, step: int) -> Tally | None:
        entries = self.feeder.entries(indices)
        if entries is None:
            return None
        device = entries.states.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16"):
            tally = self._objective(self.head, entries, self._lm_head, stage.draft_steps)
        if tally.loss.requires_grad:
            tally.loss.backward()
        if not tally.loss.isfinite():
            self._keep_bad(indices, entries, step)
        tally.loss = tally.loss.detach()
        return tally

    def _keep_bad(self, indices: list[int], entries: Entries, step: int) -> None:
        samples = [self._source.sample(i) for i in indices]
        about = {"step": step + 1, "samples": [s.name for s in samples if s is not None], "numbers": indices}
        tensors = {name: getattr(entries, name).detach().contiguous().cpu() for name in entries.names}

        def write(part: Path) -> None:
            (part / "batch.json").write_text(json.dumps(about) + "\n")
            save_file(tensors, part / "entries.safetensors")

        suffix = f"-{self.processes.rank}" if self.processes.count > 1 else ""
        write_folder(self._out / f"bad-step-{step + 1}{suffix}", write)

    def _names(self) -> list[str]:
        return [
            n for n in ("states", "middle", "distribution", "top", "tokens") if getattr(self._objective, n, 0)
        ]

    def _wanted(self) -> list[Any]:
        """What decides, besides the head's layers, which features are read: DREAM's compression and inner state."""
        layer = getattr(self._objective, "layer", None)
        return [] if layer is None else [dict(self.head.config.options), layer]

    def _due(self, every: int) -> bool:
        return every > 0 and self._step % every == 0

    def _about(self) -> dict[str, Any]:
        recipe = {name: value for name, value in self.recipe.as_dict().items() if name not in PACE}
        head = json.loads(self.head.config.to_json())
        return {
            "recipe": recipe,
            "head": head,
            "target": identity(self.target),
            "data": self._source.fingerprint,
        }

    def _restore(self) -> None:
        found = None
        if self.processes.leads:
            for name in ("best", "head"):
                recover(self._out / name)
            found = self._checkpoints.load()
        self.processes.wait()
        if not self.processes.leads:
            found = self._checkpoints.load()
        if found is None:
            return
        if not self._resume:
            raise TrainingError(
                f"{self._out} holds checkpoints; go on from them with --resume auto, or give another --out folder."
            )
        self._step, state = found
        self.head.load_state_dict(state["head"])
        self._optimiser.load_state_dict(state["optimiser"])
        self._best = state["best"]
        self._say(f"going on after step {self._step} of {self.recipe.steps}")

    def _save(self) -> None:
        if self.processes.leads:
            state = {
                "head": self.head.state_dict(),
                "optimiser": self._optimiser.state_dict(),
                "best": self._best,
            }
            self._checkpoints.save(self._step, state)
        self.feeder.save()
        self.processes.wait()

    def _validate(self, log: Log | None) -> None:
        if log is not None and (measure := self._measuring()) is not None:
            value = measure(self.head)
            log.write(self._step, {"block_efficiency": value})
            self._say(f"step {self._step}: block efficiency {value:.3f}")
            if value > self._best:
                self._best = value
                write_folder(self._out / "best", self._write_best)
        self.processes.wait()

    def _write_best(self, part: Path) -> None:
        save_head(self.head, part)
        about = {"step": self._step, "block_efficiency": self._best}
        (part / "validation.json").write_text(json.dumps(about) + "\n")

    def _measuring(self) -> Measure | None:
        if self._measure is None and self.apart:
            samples = [self._source.sample(i) for i in self.apart]
            self._measure = EngineMeasure(self.target, [s.prompt for s in samples if s is not None])
        return self._measure


def _set_apart(count: int, recipe: Recipe) -> tuple[list[int], list[int]]:
    """Samples to measure on, at most a tenth, and samples to learn from."""
    some = min(recipe.validation_samples, count // 10)
    apart = set(Random(f"apart/{recipe.seed}").sample(range(count), some))
    return sorted(apart), [i for i in range(count) if i not in apart]


def _silent(_: str) -> None:
    """The processes that do not lead."""
