"""Training loop with checkpoints, measurements and log."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from saccade.draft.heads.registry import DRAFT_VLM
from saccade.errors import TrainingError
from saccade.files import check_folder, make_folder, recover, write_folder
from saccade.inputs.processor import InputProcessor
from saccade.target_model.adapter import Target
from saccade.train.batches import Order, Prefetch, Work, split_validation
from saccade.train.checkpoint import Checkpoints, has_checkpoints, identity, newest, preserved_random_state
from saccade.train.data import Answers, Source
from saccade.train.draft_vlm import DraftVlmLearner
from saccade.train.learner import HeadLearner, Learner, Measure
from saccade.train.log import Log, check_wandb
from saccade.train.objectives.losses import Tally, recomputing
from saccade.train.optimiser import Health, Optimiser, largest_of, precision_on, rate_at
from saccade.train.processes import Processes
from saccade.train.recipe import PACE, Recipe, Stage

_CHECKPOINTS = "checkpoints"
_OTHER_OUT = "give another --out folder"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run."""

    head: Path  # folder of the drafter after the last step
    best: Path | None  # folder of the drafter with the highest block efficiency; None if it was never measured
    efficiency: float | None  # its block efficiency


def check_out(out: Path, resume: bool) -> None:
    """Check the folder of a run, which need not exist yet."""
    check_folder(out, TrainingError, _OTHER_OUT)
    if not resume and has_checkpoints(out / _CHECKPOINTS):
        raise TrainingError(f"{out} holds checkpoints; continue them with --resume auto, or {_OTHER_OUT}.")


class Trainer:
    """One run, from its first step or from its last checkpoint."""

    def __init__(
        self,
        target: Target,
        recipe: Recipe,
        source: Source,
        out: Path,
        *,
        processor: InputProcessor | None = None,
        begin: str | Path | None = None,
        features: Path | None = None,
        measure: Measure | None = None,
        resume: bool = False,
        any_target: bool = False,
        wandb: str | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        apart, chosen = split_validation(source.conversations, recipe.validation_samples, recipe.seed)
        planned, recipe = recipe.steps, recipe.over(len(chosen))
        self.target, self.recipe, self.processes = target, recipe, Processes()
        self._source, self._out = source, Path(out)
        self._say = say if self.processes.leads else lambda _: None
        if recipe.steps < planned:
            self._say(
                f"{recipe.steps} steps in place of {planned}: {recipe.epochs:g} epochs of {len(chosen)} samples. For "
                "more give more answers, --set epochs=N or --set stage1.steps=N."
            )
        for caution in recipe.cautions():
            self._say(f"Warning: {caution}")
        if isinstance(source, Answers) and not any_target:
            source.check_target(target)
        if recipe.batch_size < self.processes.count:
            raise TrainingError(
                f"A batch has {recipe.batch_size} samples, fewer than the {self.processes.count} processes; start "
                "fewer, or give a larger batch_size, best a multiple of their number."
            )
        self._wandb = wandb
        if wandb is not None:
            check_wandb()
        target.model.requires_grad_(False)
        self.learner: Learner
        if recipe.kind == DRAFT_VLM:
            if features is not None:
                raise TrainingError("A draft VLM reads no features of the target; leave out --features.")
            self.learner = DraftVlmLearner(target, processor, recipe, source, begin=begin, say=self._say)
        else:
            count = self.processes.count
            self.learner = HeadLearner(
                target, recipe, source, self._out, begin=begin, features=features, count=count, say=self._say
            )
        self.precision = precision_on(target.device, recipe.precision)
        self._optimiser = Optimiser(self.learner.module, recipe)
        self.order = Order(source.lengths, chosen, recipe.batch_size, recipe.seed)  # samples of every step
        self.apart, self._measure = apart, measure
        self._unread = apart if measure is None else []
        self._checkpoints = Checkpoints(self._out / _CHECKPOINTS, self._about())
        self._step, self._best = 0, -math.inf
        self._health = Health(largest=largest_of(self._optimiser.weights))
        self._resume, self._unmeasured = resume, False
        self._batches = Prefetch(lambda step, indices: self.learner.prepare(indices, step))

    def run(self) -> Outcome:
        if self.processes.leads:
            make_folder(self._out, TrainingError, _OTHER_OUT)
        self._restore()
        if self._measure is None and self.recipe.validation_samples and not self.apart:
            self._say(f"Fewer than 10 answers: none is kept to measure on, so no {self._out}/best is made.")
        log = None
        if self.processes.leads:
            again = "block_efficiency" if self._unmeasured else None
            about = self.recipe.as_dict()
            log = Log(self._out, self._step, self.recipe.steps, self._say, again, self._wandb, about)
        if self._unmeasured:
            self._validate(log)
        if self.target.shards is None:  # whose forwards and the sums of gradients must come in one order everywhere
            self._batches.begin(work for step in range(self._step, self.recipe.steps) for work in self._share(step))
        try:
            self._train(log)
        finally:
            self._batches.close()
        self.learner.close()
        last = self._out / self.learner.folder
        if log is not None:
            log.close()
            write_folder(last, self.learner.save, error=TrainingError)
        self.processes.wait()
        best = self._out / "best" if self._best > -math.inf else None
        return Outcome(last, best, self._best if best else None)

    def _train(self, log: Log | None) -> None:
        """Run the remaining steps, with checkpoints and measurements."""
        begun = time.monotonic()
        for step in range(self._step, self.recipe.steps):
            values = self.train_step(step)
            self._step = step + 1
            if log is not None and (self._due(self.recipe.log_every) or self._step == self.recipe.steps):
                values["seconds"] = round(time.monotonic() - begun, 3)
                log.write(self._step, values)
                log.progress(self._step, f"loss {values['loss']:.4f}")
            over = self._step == self.recipe.steps
            self._unmeasured = self._due(self.recipe.validate_every) or over
            if self._due(self.recipe.checkpoint_every) or over:
                self._save()  # before measuring, which may fail where training did not
            if self._unmeasured:
                self._validate(log)

    def train_step(self, step: int, tried: int | None = None) -> dict[str, Any]:
        """One update of the weights, or for a plan a step as in a stage, counted from 1, without its update."""
        number, stage, within = self.recipe.at(step)
        if tried is not None:
            number, stage, within = tried, self.recipe.stages[tried - 1], 0
        self._optimiser.train_only(self.learner.weights(number))
        tallies = [
            self._backward(indices, self._batches.pop((step, indices)), stage, step) for _, indices in self._share(step)
        ]
        if self.target.shards is not None:
            self.target.shards.attend()  # layers that other processes still need
        names, steps = self.learner.terms, stage.draft_steps
        sums = torch.zeros(1 + len(names) + 3 * steps, dtype=torch.float64, device=self.target.device)
        for tally in tallies:
            if tally is not None:
                values = torch.stack([tally.loss, *(tally.terms[name] for name in names)]).double()
                sums += torch.cat([values, tally.kept, tally.tried, tally.right])
        loss, *numbers = self.processes.sum(sums).tolist()
        self.processes.sum_gradients(self._optimiser.weights)
        counts = [int(number) for number in numbers[len(names) :]]
        kept, tested, right = (counts[start : start + steps] for start in range(0, 3 * steps, steps))
        if not math.isfinite(loss):
            rank = "" if self.processes.count == 1 else "-RANK"
            raise TrainingError(
                f"The loss is {loss} at step {step + 1}; its batch is in {self._out}/bad-step-{step + 1}{rank}. "
                + self._advice(number)
            )
        examples, rate, norm = sum(kept), rate_at(stage, within), 0.0
        if examples and tried is None:
            for weight in self._optimiser.weights:
                if weight.grad is not None:
                    weight.grad /= examples
            norm = self._optimiser.step(rate)
        else:
            self._optimiser.clear()
        if not math.isfinite(norm):
            raise TrainingError(
                f"The gradient is {norm} at step {step + 1} though the loss is {loss / examples}. "
                + self._advice(number)
            )
        mean = max(examples, 1)
        if examples and tried is None and not self._health.observe(step, loss / mean, self._optimiser.weights):
            raise TrainingError(
                f"The update of step {step + 1} leaves weights that are not finite, at a rate of {rate:g}; nothing "
                f"was written of them. {self._advice(number)}"
            )
        return {
            "stage": number,
            "loss": loss / mean,
            **{name: value / mean for name, value in zip(names, numbers, strict=False)},
            "rate": rate,
            "gradient": norm,
            "examples": kept,
            "agreement": [r / t if t else 0.0 for r, t in zip(right, tested, strict=True)],
        }

    def _advice(self, number: int) -> str:
        """Options that go on from the last checkpoint in order, past stages that are over, with a lower rate of one."""
        lower = f"stage{number}.rate={self.recipe.stages[number - 1].rate / 10:g}"
        words, last = (
            ["--set", lower, "--out", f"{self._out}-again"],
            newest(self._out / _CHECKPOINTS, self._health.sound),
        )
        if last is not None:
            over = range(1, self.recipe.at(int(last.name.removeprefix("step-")))[0])
            words += ["--from", str(last), *(word for n in over for word in ("--set", f"stage{n}.steps=0"))]
        return f"The same command with {shlex.join(words)} goes on with a lower rate; a smaller clip may help, too."

    def _share(self, step: int) -> list[Work]:
        """This process's micro batches of a step."""
        mine = self.order.at(step)[self.processes.rank :: self.processes.count]
        size = self.recipe.micro_batch
        return [(step, mine[i : i + size]) for i in range(0, len(mine), size)]

    def _backward(self, indices: list[int], prepared: Any, stage: Stage, step: int) -> Tally | None:
        if prepared is None:
            return None
        batch = self.learner.batch(prepared)
        narrow = torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.precision == "bf16")
        with narrow, recomputing(self.recipe.recompute):
            tally = self.learner.loss(batch, stage)
        if tally.loss.requires_grad:
            tally.loss.backward()
        tally.loss = tally.loss.detach()
        if tally.loss.isfinite():
            return tally
        samples = [self._source.sample(i) for i in indices]
        about = {"step": step + 1, "samples": [s.name for s in samples if s is not None], "numbers": indices}
        tensors = self.learner.tensors(batch)
        content = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}

        def write(part: Path) -> None:
            (part / "batch.json").write_text(json.dumps(about) + "\n")
            save_file(content, part / "entries.safetensors")

        suffix = f"-{self.processes.rank}" if self.processes.count > 1 else ""
        write_folder(self._out / f"bad-step-{step + 1}{suffix}", write, error=TrainingError)
        return tally

    def _due(self, every: int) -> bool:
        return every > 0 and self._step % every == 0

    def _about(self) -> dict[str, Any]:
        recipe = {name: value for name, value in self.recipe.as_dict().items() if name not in PACE}
        recipe["precision"] = self.precision
        return {
            "recipe": recipe,
            "head": self.learner.about,
            "target": identity(self.target),
            "data": self._source.fingerprint,
            "inputs": dict(self._source.inputs),
        }

    def _restore(self) -> None:
        found = None
        if self.processes.leads:
            for name in ("best", self.learner.folder):
                recover(self._out / name)
            found = self._checkpoints.load()
        self.processes.wait()
        if not self.processes.leads:
            found = self._checkpoints.load()
        self.processes.wait()  # all have read it before the leader changes it
        if found is None:
            return
        check_out(self._out, self._resume)
        self._step, state = found
        self.learner.load_state(state["head"])
        self._optimiser.load_state_dict(state["optimiser"])
        self._best, self._unmeasured = state["best"], state["unmeasured"]
        self._health = Health(**state.get("health", {**asdict(self._health), "sound": self._step}))
        self._say(f"going on after step {self._step} of {self.recipe.steps}")

    def _save(self) -> None:
        self._batches.rest()
        if self.processes.leads:
            state = {
                "head": self.learner.state(),
                "optimiser": self._optimiser.state_dict(),
                "best": self._best,
                "unmeasured": self._unmeasured,
                "health": asdict(self._health),
            }
            self._checkpoints.save(self._step, state, self._health.sound)
        self.processes.wait()

    def _validate(self, log: Log | None) -> None:
        """Measure, log it, and write the drafter if it is the best."""
        self._batches.rest()  # the target is needed
        value = None
        if log is not None or self.target.shards is not None:  # a sharded target answers in all processes at once
            if self._unread:
                samples = [self._source.sample(i) for i in self._unread]
                self._unread = []
                self._measure = self.learner.measure([s.prompt for s in samples if s is not None])
            if self._measure is not None:
                with preserved_random_state():  # later steps are the same after a measurement and a checkpoint
                    value = self._measure(self.learner.module)
        better = value is not None and value > self._best
        if value is not None and better:
            self._best = value
        if log is not None:
            if value is not None:
                log.write(self._step, {"block_efficiency": value})
                self._say(f"step {self._step}: block efficiency {value:.3f}")
            if better:
                write_folder(self._out / "best", self._write_best, error=TrainingError)
            self._checkpoints.amend(self._step, {"best": self._best, "unmeasured": False})
        self._unmeasured = False
        self.processes.wait()

    def _write_best(self, part: Path) -> None:
        self.learner.save(part)
        about = {"step": self._step, "block_efficiency": self._best}
        (part / "validation.json").write_text(json.dumps(about) + "\n")
