"""What the loop of a run asks of whatever it trains: a head, or a draft model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from saccade.inputs.prompt import Prompt
from saccade.train.losses import Tally
from saccade.train.recipe import Stage
from saccade.train.validate import Measure


class Learner(Protocol):
    """A drafter that is being trained, with how it is fed, judged, measured and written.

    Attributes:
        module: the drafter's weights, as a measure takes them; those that ever learn have gradients.
        word: what plans call it.
        folder: name of the folder that it is left in.
        terms: names of the loss's terms, for the log.
        about: what must be the same for a run to go on (JSON values).
    """

    word: str
    folder: str
    about: Mapping[str, Any]

    @property
    def module(self) -> nn.Module: ...

    @property
    def terms(self) -> Sequence[str]: ...

    def weights(self, number: int) -> list[nn.Parameter]:
        """Those that learn in a stage, counted from 1."""
        ...

    def describe(self, number: int, stage: Stage) -> str:
        """What a stage does, in a few words."""
        ...

    def prepare(self, indices: Sequence[int], step: int) -> Any | None:
        """What `batch` takes of samples, whatever the drafter's weights; None where none of them can be used.

        It may run in another thread while an earlier step learns.
        """
        ...

    def batch(self, prepared: Any) -> Any:
        """What `judge` takes."""
        ...

    def judge(self, batch: Any, stage: Stage) -> Tally:
        """The loss, with gradients."""
        ...

    def tensors(self, batch: Any) -> dict[str, Tensor]:
        """All of a batch by name, for a look at one that went wrong."""
        ...

    def batch_bytes(self, indices: Sequence[int]) -> int:
        """About what a forward and backward pass over samples takes."""
        ...

    def cache_bytes(self, indices: Sequence[int]) -> float:
        """Bytes that a sample takes in a cache of features, mean over these; 0 where there is none to have."""
        ...

    def state(self) -> dict[str, Tensor]:
        """The weights that a checkpoint holds."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave."""
        ...

    def keep(self) -> None:
        """Bring to disk what a run that goes on from here need not find again."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...

    def save(self, folder: Path) -> None:
        """Write the drafter as it is loaded later."""
        ...

    def measure(self, prompts: Sequence[Prompt]) -> Measure | None:
        """What tells how long its drafts are accepted, over answers to these prompts; None if none has room for one."""
        ...
