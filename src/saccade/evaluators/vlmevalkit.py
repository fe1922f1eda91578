"""Saccade's model in VLMEvalKit: any method on its data sets, with the speed next to the scores.

VLMEvalKit has no entry points for models: it looks classes up in ``vlmeval.vlm`` and names in ``supported_VLM``.
`register` adds both, and ``python -m saccade.evaluators.vlmevalkit run.py ...`` then runs VLMEvalKit's own script.
"""

from __future__ import annotations

import atexit
import logging
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from typing import Any

from saccade.errors import InputError, SaccadeError
from saccade.evaluators.evaluated_model import EvaluatedModel, TaskQuestion, described
from saccade.inputs.processor import Messages

FAILED = "Failed to obtain answer via API."
"""Answer by which VLMEvalKit knows questions that it reports as failed and asks again."""

_LOG = logging.getLogger("saccade")


class SaccadeModel:
    """The part of VLMEvalKit's model that is Saccade's; `register` joins it with VLMEvalKit's base class."""

    INTERLEAVE = True
    VIDEO_LLM = True

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        for name in ("num_frames", "fps"):
            if arguments.get(name) is not None:
                raise InputError(
                    f"VLMEvalKit's data sets decide how videos are sampled; give {name} in the configuration of the "
                    "data set (nframe or fps), not to the model."
                )
        self.model = EvaluatedModel(arguments, _LOG.warning, ("target", "model_path"), int(os.environ.get("RANK", 0)))
        self.nframe: int | None = 8
        self.fps: float | None = 1.0
        self.is_api = self.model.max_rows > 1
        self._engine = ThreadPoolExecutor(1, "saccade")  # owns the batch, for questions from several threads
        atexit.register(self.report_speed)

    def generate_inner(self, message: Sequence[Mapping[str, Any]], dataset: str | None = None) -> str:
        """Answer one question, whose parts may have roles."""
        sampling: dict[str, Any] = {}
        if any(part["type"] == "video" for part in message):
            if self.nframe is not None and self.fps is not None:
                raise InputError(
                    "VLMEvalKit hands the sampling of videos over only where it asks one question at a time; give "
                    "batch_size=1 for video data sets."
                )
            sampling = {"num_frames": self.nframe, "fps": self.fps}
        question = TaskQuestion(dataset or "unnamed", "a question", partial(conversation, message), {}, sampling)
        run = lambda step, *of: self._engine.submit(step, *of).result()  # noqa: E731
        run(self.model.add, question)
        while not question.done:  # every thread that waits for an answer has the steps run, in turn
            run(self.model.step)
        answer = run(self.model.answer, question)
        run(self.model.save)
        return FAILED if answer.failure else str(answer.text)

    def chat_inner(self, messages: Sequence[Mapping[str, Any]], dataset: str | None = None) -> str:
        """Answer the last of several turns, each with ``role`` and ``content`` (parts as in `generate_inner`)."""
        parts = [{**part, "role": message["role"]} for message in messages for part in message["content"]]
        return self.generate_inner(parts, dataset)

    def report_speed(self) -> None:
        """Log the speed by data set, and write the speed file."""
        for task, speed in self.model.speeds.items():
            _LOG.warning("Speed of %s: %s.", task, described(speed))
        self.model.save()


def conversation(parts: Sequence[Mapping[str, Any]]) -> Messages:
    """A conversation from a list of parts: neighbours of one role are one message."""
    messages: list[dict[str, Any]] = []
    for part in parts:
        role = part.get("role", "user")
        kind = part["type"]
        if kind not in ("text", "image", "video"):
            raise InputError(f"A message part of type {kind!r} is not usable; expected one of text, image, video.")
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": []})
        messages[-1]["content"].append({"type": kind, kind: part["value"]})
    return messages


def register(name: str | None = None, **arguments: Any) -> type:
    """Make VLMEvalKit know the class ``Saccade``, and a model of a name where one is given."""
    if find_spec("vlmeval") is None:
        raise SaccadeError("VLMEvalKit is not installed here; install it from its repository, into this environment.")
    import vlmeval.config
    import vlmeval.vlm
    from vlmeval.vlm.base import BaseModel

    model = type("Saccade", (SaccadeModel, BaseModel), {"__doc__": SaccadeModel.__doc__})
    vlmeval.vlm.Saccade = model
    if name is not None:
        vlmeval.config.supported_VLM[name] = partial(model, **arguments)
    return model


def main(arguments: Sequence[str]) -> None:
    """Run VLMEvalKit's ``run.py`` with its own arguments, the class registered before."""
    if not arguments or arguments[0].startswith("-"):
        raise SaccadeError(
            "Name VLMEvalKit's run.py first, then its own arguments: "
            "python -m saccade.evaluators.vlmevalkit run.py --config config.json"
        )
    script = arguments[0]
    sys.argv = list(arguments)
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))  # as Python does for a script that it runs itself
    register()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
