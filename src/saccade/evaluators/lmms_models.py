"""Saccade's models in lmms-eval: any method on its tasks, with the speed beside the scores.

lmms-eval imports this module when ``--model saccade`` is chosen; nothing else does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from lmms_eval.api.instance import GenerationResult, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from loguru import logger
from PIL import Image
from tqdm import tqdm

from saccade.errors import InputError
from saccade.evaluators.evaluated_model import EvaluatedModel, TaskAnswer, TaskQuestion, TaskSpeed
from saccade.inputs.processor import Messages

IMAGE_ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
SOUND_ENDINGS = {".wav", ".mp3", ".m4a", ".aac", ".flac", ".ogg", ".opus"}

Part = Mapping[str, Any]


class _Saccade(lmms):
    """Base of the chat and the simple model."""

    _question: Callable[[Sequence[Any]], TaskQuestion]  # of a request's arguments
    _round: Callable[[Sequence[Any], dict[str, Any]], tuple[TaskQuestion | None, Any]]  # the same of a later round

    def __init__(self, max_batch_size: Any = None, **arguments: Any) -> None:
        super().__init__()
        rank = int(os.environ.get("RANK", 0))
        processes = int(os.environ.get("WORLD_SIZE", 1))
        self._rank, self._world_size = rank, processes
        if processes > 1 and torch.cuda.is_available() and arguments.get("device") in (None, "cuda"):
            arguments["device"] = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        self.model = EvaluatedModel(arguments, logger.warning, ("target", "pretrained"), rank)
        self.device = self.model.vlm.target.device

    @property
    def chat_template(self) -> Any:
        """Refused: the template is always applied."""
        raise InputError(
            "--apply_chat_template is not for the model saccade, which always applies the checkpoint's chat template "
            "to the task's messages; leave it out."
        )

    def clean(self) -> None:
        """Free caches and models before a local judge takes their place."""
        self.model.close()
        super().clean()

    def _doc(self, task: str, split: str, doc_id: int) -> Any:
        return self.task_dict[task][split][doc_id]

    def _answers(self, questions: Sequence[TaskQuestion], title: str) -> list[TaskAnswer]:
        """Answer questions, and log their speed where lmms-eval collects it for its results."""
        before = self.model.total
        with tqdm(total=len(questions), disable=self.rank != 0, desc=title) as bar:
            answers = self.model.answers(questions, bar.update)
        after = self.model.total
        new = TaskSpeed(**{name: getattr(after, name) - getattr(before, name) for name in TaskSpeed.__slots__})
        if new.answers:
            rates = new.rates
            log_metrics(
                total_elapsed_time=new.seconds,
                total_gen_tokens=new.new_tokens,
                avg_speed=rates["tokens_per_second"],
                additional_metrics={
                    "tokens_per_target_pass": rates["tokens_per_pass"],
                    "acceptance": rates["acceptance"],
                    "total_requests": new.answers,
                    "failed": new.failed,
                    "cut_at_limit": new.cut,
                },
            )
        for task, speed in self.model.speeds.items():
            logger.info(f"Speed of {task}: {speed}.")
        return answers

    def generate_until(self, requests: list[Any]) -> list[Any]:
        """Answer requests."""
        answers = self._answers([self._question(request.args) for request in requests], "Answering")
        return [GenerationResult(a.text, TokenCounts(a.prompt_tokens, a.new_tokens)) for a in answers]

    def generate_until_multi_round(self, requests: list[Any]) -> list[list[str]]:
        """Answer every round of requests; the task's function is called with the answers so far.

        All questions of a round share the batch.
        """
        answers: list[list[str]] = [[] for _ in requests]
        notes: list[Any] = [None] * len(requests)
        questions: dict[int, TaskQuestion] = {n: self._question(r.args) for n, r in enumerate(requests)}
        number = 0
        while questions:
            number += 1
            replies = self._answers(list(questions.values()), f"Round {number}")
            for place, reply in zip(list(questions), replies, strict=True):
                answers[place].append(reply.text)
                state = {
                    "round_idx": number,
                    "previous_output": list(answers[place]),
                    "previous_round_info": notes[place],
                }
                question, notes[place] = self._round(requests[place].args, state)
                if question is None:
                    del questions[place]
                else:
                    questions[place] = question
        return answers


class SaccadeChat(_Saccade):
    """A model that receives the messages of each task, with pictures in their places."""

    is_simple = False

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Refuse: lmms-eval scores continuations with simple models only."""
        raise InputError("lmms-eval scores continuations with simple models only; give --force_simple as well.")

    def _question(self, arguments: Sequence[Any]) -> TaskQuestion:
        _, doc_to_messages, settings, doc_id, task, split = arguments
        messages = lambda: _conversation(doc_to_messages(self._doc(task, split, doc_id)))  # noqa: E731
        return TaskQuestion(task, f"document {doc_id}", messages, settings)

    def _round(self, arguments: Sequence[Any], state: dict[str, Any]) -> tuple[TaskQuestion | None, Any]:
        _, doc_to_messages, settings, doc_id, task, split = arguments
        result = doc_to_messages(self._doc(task, split, doc_id), **state)
        if not (isinstance(result, tuple) and len(result) == 4) or result[1]:
            return None, None
        return TaskQuestion(task, f"document {doc_id}", partial(_conversation, result[0]), settings), result[3]


class SaccadeSimple(_Saccade):
    """A model that receives a text and a list of pictures or videos, and also scores continuations."""

    is_simple = True

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Score continuations."""
        scores = []
        for request in tqdm(requests, disable=self.rank != 0, desc="Scoring"):
            _, continuation, _, doc_id, task, split = request.args
            if not isinstance(continuation, str):
                continuation = str(continuation(self._doc(task, split, doc_id)))
            scores.append(self.model.score(self._question(request.args), continuation))
        self.model.save()
        return scores

    def _question(self, arguments: Sequence[Any]) -> TaskQuestion:
        context, settings, visuals, *_, doc_id, task, split = arguments
        messages = partial(self._messages, context, visuals, doc_id, task, split)
        return TaskQuestion(task, f"document {doc_id}", messages, settings)

    def _round(self, arguments: Sequence[Any], state: dict[str, Any]) -> tuple[TaskQuestion | None, Any]:
        _, settings, _, doc_to_text, *place = arguments
        doc_id, task, split = place
        result = doc_to_text(self._doc(task, split, doc_id), **state)
        if not (isinstance(result, tuple) and len(result) == 5) or result[2]:
            return None, None
        visuals, context, _, _, notes = result
        return self._question((context, settings, visuals, *place)), notes

    def _messages(self, context: Any, visuals: Any, doc_id: int, task: str, split: str) -> Messages:
        if not isinstance(context, str):
            raise InputError(f"The task's text is of type {type(context).__name__}; expected a string.")
        if callable(visuals):
            visuals = visuals(self._doc(task, split, doc_id))
        if not isinstance(visuals, (list, tuple)):
            visuals = [] if visuals is None else [visuals]
        messages, has_removed = with_visuals(context, visuals)
        if has_removed:
            self.model.log(
                f"Task {task} has <image> in its text more or less often than pictures; it was taken out, and the "
                "pictures come first."
            )
        return messages


def with_visuals(text: str, visuals: Sequence[Any]) -> tuple[Messages, bool]:
    """One user message of a text and its visuals, and whether ``<image>`` was removed because its number is wrong.

    Pictures go where the text has ``<image>``, once for each, or ``<image 1>``, ``<image 2>`` and so on, at their first
    mention; all others come first.
    """
    parts = [_part_of(visual) for visual in visuals]
    pictures = [part for part in parts if part["type"] == "image"]
    marks = text.count("<image>")
    removes = marks not in (0, len(pictures))
    if removes:
        text = text.replace("<image>", "")
        marks = 0
    content: list[Part] = []
    placed: set[int] = set()
    start = 0
    for number, place in enumerate(re.finditer("<image>" if marks else r"<image (\d+)>", text)):
        index = number if marks else int(place[1]) - 1
        if index in placed or not 0 <= index < len(pictures):
            continue
        placed.add(index)
        content += [{"type": "text", "text": text[start : place.start()]}, pictures[index]]
        start = place.end()
    content.append({"type": "text", "text": text[start:]})
    inside = [id(pictures[index]) for index in placed]
    first = [part for part in parts if id(part) not in inside]
    return [{"role": "user", "content": [*first, *(part for part in content if part.get("text") != "")]}], removes


def _conversation(messages: Any) -> Messages:
    """A conversation from the messages of a task, in lmms-eval's form."""
    conversation = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            content = [_part_of_message(item) for item in content]
        conversation.append({"role": message.get("role"), "content": content})
    return conversation


def _part_of_message(item: Any) -> Part:
    if isinstance(item, str):
        return {"type": "text", "text": item}
    if not isinstance(item, Mapping):
        return _part_of(item)
    if item.get("type") == "text":
        return {"type": "text", "text": str(item.get("text", ""))}
    if isinstance(item.get("url"), Mapping):  # instead of the path a task may give a table with the bounds of the clip
        item = {**item, "url": None, **item["url"]}
    return _part_of(item)


def _part_of(visual: Any) -> Part:
    """Message part of one picture or video."""
    if isinstance(visual, Mapping):
        return _part_of_table(visual)
    kind = "video"
    if isinstance(visual, (str, PurePath)):
        ending = PurePath(visual).suffix.lower()
        if ending in SOUND_ENDINGS:
            raise InputError(f"{visual} is audio, which Saccade's models do not accept; choose another task.")
        if ending in IMAGE_ENDINGS or str(visual).startswith("data:image/"):
            kind = "image"
    elif isinstance(visual, Image.Image) or (isinstance(visual, np.ndarray) and visual.ndim == 3):
        kind = "image"
    elif not isinstance(visual, (list, tuple, np.ndarray)):
        raise InputError(
            f"A task's visual of type {type(visual).__name__} is not usable; expected a PIL image, an array, a list of "
            "frames, or a path."
        )
    return {"type": kind, kind: visual}


def _part_of_table(visual: Mapping[str, Any]) -> Part:
    kind = visual.get("type")
    if kind == "audio" or "sampling_rate" in visual:
        raise InputError("The task passes audio, which Saccade's models do not accept; choose another task.")
    for name in ("video_start", "video_end", "start_time", "end_time"):
        if visual.get(name) is not None:
            raise InputError(
                f"The task asks for part of a video ({name}={visual[name]}), which is not supported; cut it first."
            )
    source = next((visual[name] for name in ("url", "path", "image", "video") if visual.get(name) is not None), None)
    if source is None:
        raise InputError(f"A task's visual with the keys {', '.join(map(str, visual))} has neither url nor path.")
    is_sound = isinstance(source, (str, PurePath)) and PurePath(source).suffix.lower() in SOUND_ENDINGS
    if kind in ("image", "video") and not is_sound:
        return {"type": kind, kind: source}
    return _part_of(source)
