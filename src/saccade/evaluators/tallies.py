"""Speed of an evaluation beside its scores: counts and seconds per task, in a file and in one line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError
from saccade.files import write_file
from saccade.output import Output
from saccade.wording import count


@dataclass(slots=True)
class Tally:
    """Sums over the answers of a task, or of all."""

    answers: int = 0  # that were generated
    failed: int = 0  # answers left empty because their question could not be used
    cut: int = 0  # answers that ended at their limit of tokens
    prompt_tokens: int = 0
    new_tokens: int = 0
    decoded_tokens: int = 0
    target_passes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    seconds: float = 0.0  # wall time, reading of media and tokenization included
    scored: int = 0  # continuations whose log-probability was computed; they take no drafts
    scoring_seconds: float = 0.0  # wall time for them

    def add(self, output: Output, seconds: float) -> None:
        """Add an answer."""
        stats = output.stats
        self.answers += 1
        self.cut += output.finish_reason == "length"
        self.prompt_tokens += stats.prompt_tokens
        self.new_tokens += stats.new_tokens
        self.decoded_tokens += stats.decoded_tokens
        self.target_passes += stats.target_passes
        self.drafted_tokens += stats.drafted_tokens
        self.accepted_tokens += stats.accepted_tokens
        self.seconds += seconds

    @property
    def rates(self) -> dict[str, float]:
        """Tokens per second, tokens per target pass (prefill excluded), and accepted share of drafted tokens."""

        def ratio(part: float, whole: float) -> float:
            return round(part / whole, 4) if whole else 0.0

        return {
            "tokens_per_second": ratio(self.new_tokens, self.seconds),
            "tokens_per_pass": ratio(self.decoded_tokens, self.target_passes),
            "acceptance": ratio(self.accepted_tokens, self.drafted_tokens),
        }

    def as_dict(self) -> dict[str, Any]:
        """All sums and rates as JSON values."""
        found = {**asdict(self), **self.rates}
        return {**found, "seconds": round(self.seconds, 4), "scoring_seconds": round(self.scoring_seconds, 4)}

    def __str__(self) -> str:
        rates = self.rates
        return (
            f"{count(self.answers, 'answer')} with {count(self.new_tokens, 'token')} in {self.seconds:.1f} s: "
            f"{rates['tokens_per_second']:.1f} tokens/s, {rates['tokens_per_pass']:.2f} tokens per target pass, "
            f"{rates['acceptance']:.2f} of the drafted tokens accepted"
        )


@dataclass(slots=True)
class Speed:
    """Tallies of all tasks of an evaluation."""

    run: dict[str, Any]  # facts about models, method and settings
    path: Path | None = None  # JSON file that `save` writes; None for none
    tasks: dict[str, Tally] = field(default_factory=dict)  # one tally per task

    def of(self, task: str) -> Tally:
        """Tally of a task."""
        return self.tasks.setdefault(task, Tally())

    @property
    def total(self) -> Tally:
        """Sums over all tasks."""
        rows = [asdict(tally) for tally in self.tasks.values()]
        return Tally(**{name: sum(row[name] for row in rows) for name in asdict(Tally())})

    def save(self) -> None:
        """Write the file, where one is named."""
        if self.path is not None:
            tasks = {name: tally.as_dict() for name, tally in self.tasks.items()}
            content = {"run": self.run, "total": self.total.as_dict(), "tasks": tasks}
            write_file(self.path, json.dumps(content, indent=2) + "\n", advice="choose another file with speed=FILE")


def speed_file(given: str | None, rank: int) -> Path | None:
    """Path of the speed file of one process; those of further processes get their number."""
    if given is None:
        return None
    path = Path(given).expanduser()
    if path.is_dir():
        raise SaccadeError(f"speed={given} is a folder; give the name of a JSON file in it.")
    return path if rank == 0 else path.with_name(f"{path.stem}.{rank}{path.suffix}")
