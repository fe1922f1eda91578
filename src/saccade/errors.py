"""The errors and warnings that users meet; an error is one sentence: what was wrong, what was expected, what to do."""

from __future__ import annotations


class SaccadeError(ValueError):
    """Something the user gave or configured cannot be used as it is.

    >>> try:
    ...     saccade.load("pocket", method="chain", gama=7)
    ... except saccade.SaccadeError as problem:
    ...     print(problem)
    Method chain has no option gama (did you mean gamma?); its options are: draft_with, tree, gamma, rule, ...
    """


class InputError(SaccadeError):
    """A prompt, an image, a video or a generation argument is not usable."""


class ModelError(SaccadeError):
    """A checkpoint or a pair of checkpoints is not usable."""


class MethodError(SaccadeError):
    """A method, or the parts named for it, do not exist or do not fit together."""


class TrainingError(SaccadeError):
    """Training data, a recipe or a checkpoint is not usable, or training cannot continue."""


class KilledError(RuntimeError):
    """A process that reads images or videos was killed, as by a system without memory; the input is not to blame."""


class SaccadeWarning(UserWarning):
    """A request is served in another way, or under an assumption, that its sender may not expect."""
