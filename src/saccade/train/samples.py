"""Training samples: prompts with the target's own answers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from saccade.errors import TrainingError
from saccade.inputs.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt with the target's answer."""

    name: str  # for messages
    prompt: Prompt  # of the target
    answer: tuple[int, ...]  # token ids of its answer, with the end-of-sequence token if it was reached

    @property
    def ids(self) -> tuple[int, ...]:
        """The whole sequence."""
        return (*self.prompt.ids, *self.answer)


class Source(Protocol):
    """A numbered set of samples."""

    lengths: Sequence[int]  # approximate tokens of every sample, for batches of similar length
    conversations: Sequence[int]  # a number per sample, equal for turns of one conversation
    fingerprint: str  # digest of the content, compared on resume
    inputs: Mapping[str, str]  # digests of other inputs of the samples, by name

    def sample(self, index: int) -> Sample | None:
        """Return one sample; None to skip an unusable one."""
        ...

    def answers(self) -> Iterator[Sequence[int]]:
        """Yield the answers' token ids without preparing any prompt."""
        ...


class Listed:
    """Samples in memory, each a conversation of its own."""

    def __init__(self, pairs: Iterable[tuple[Prompt, Sequence[int]]]) -> None:
        self._samples = [Sample(str(i), p, tuple(answer)) for i, (p, answer) in enumerate(pairs)]
        if not self._samples:
            raise TrainingError("The training data are empty; give at least one prompt with an answer.")
        for sample in self._samples:
            if not sample.answer:
                raise TrainingError(f"Sample {sample.name} has an empty answer; leave it out.")
        self.lengths: Sequence[int] = [len(s.ids) for s in self._samples]
        self.conversations: Sequence[int] = range(len(self._samples))
        content = hashlib.sha256()
        for sample in self._samples:
            content.update(repr((sample.prompt.ids, sample.answer)).encode())
            content.update(repr([m.digest for m in sample.prompt.media]).encode())
        self.fingerprint = content.hexdigest()
        self.inputs: Mapping[str, str] = {}

    def sample(self, index: int) -> Sample:
        return self._samples[index]

    def answers(self) -> Iterator[Sequence[int]]:
        return (sample.answer for sample in self._samples)
