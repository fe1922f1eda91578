"""Saccade's models in lmms-eval: any method on its tasks, with the speed next to the scores."""

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

from saccade.data.conversations import placed
from saccade.errors import InputError
from saccade.evaluators.evaluated_model import EvaluatedModel, TaskAnswer, TaskQuestion, described, rates
from saccade.inputs.processor import Messages
from saccade.jobs.items import IMAGES

SOUND_ENDINGS = {".wav", ".mp3", ".m4a", ".aac", ".flac", ".ogg", ".opus"}

_MARKS = re.compile(r"(<image(?: \d+)?>)")
Part = Mapping[str, Any]
Arguments = Sequence[Any]  # of a request
Round = tuple[TaskQuestion | None, Any]  # the next question of a task of several rounds, and the task's notes
Scores = list[tuple[float, bool]]


class _Saccade(lmms):
    """Base of the chat and the simple model."""

    _question: Callable[[Arguments], TaskQuestion]
    _round: Callable[[Arguments, dict[str, Any]], Round]

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
        new = {name: value - before[name] for name, value in self.model.total.items()}
        if new["answers"]:
            speed = rates(new)
            log_metrics(
                total_elapsed_time=new["seconds"],
                total_gen_tokens=new["new_tokens"],
                avg_speed=speed["tokens_per_second"],
                additional_metrics={
                    "tokens_per_target_pass": speed["tokens_per_pass"],
                    "acceptance": speed["acceptance"],
                    "total_requests": new["answers"],
                    "failed": new["failed"],
                    "cut_at_limit": new["cut"],
                },
            )
        for task, sums in self.model.speeds.items():
            logger.info(f"Speed of {task}: {described(sums)}.")
        return answers

    def generate_until(self, requests: list[Any]) -> list[Any]:
        results = []
        for answer in self._answers([self._question(request.args) for request in requests], "Answering"):
            tokens = TokenCounts(answer.prompt_tokens, answer.new_tokens)
            results.append(GenerationResult(answer.text, tokens))
        return results

    def generate_until_multi_round(self, requests: list[Any]) -> list[list[str]]:
        """Answer every round of requests; the task's function is called with the answers so far."""
        answers: list[list[str]] = [[] for _ in requests]
        notes: list[Any] = [None] * len(requests)
        questions = {place: self._question(request.args) for place, request in enumerate(requests)}
        number = 0
        while questions:
            number += 1
            replies = self._answers([*questions.values()], f"Round {number}")
            for place, reply in zip(questions, replies, strict=True):
                answers[place].append(reply.text)
            following = dict[int, TaskQuestion]()
            for place in questions:
                state = {"round_idx": number, "previous_output": list(answers[place])}
                state["previous_round_info"] = notes[place]
                question, notes[place] = self._round(requests[place].args, state)
                if question is not None:
                    following[place] = question
            questions = following
        return answers


class SaccadeChat(_Saccade):
    """A model that receives the messages of each task, with pictures in their places."""

    is_simple = False

    def loglikelihood(self, requests: list[Any]) -> Scores:
        raise InputError("lmms-eval scores continuations with simple models only; give --force_simple as well.")

    def _question(self, arguments: Arguments) -> TaskQuestion:
        _, doc_to_messages, settings, doc_id, task, split = arguments
        messages = lambda: _conversation(doc_to_messages(self._doc(task, split, doc_id)))  # noqa: E731
        return TaskQuestion(task, f"document {doc_id}", messages, settings)

    def _round(self, arguments: Arguments, state: dict[str, Any]) -> Round:
        _, doc_to_messages, settings, doc_id, task, split = arguments
        result = doc_to_messages(self._doc(task, split, doc_id), **state)
        if not (isinstance(result, tuple) and len(result) == 4) or result[1]:
            return None, None
        return TaskQuestion(task, f"document {doc_id}", partial(_conversation, result[0]), settings), result[3]


class SaccadeSimple(_Saccade):
    """A model that receives a text and a list of pictures or videos, and also scores continuations."""

    is_simple = True

    def loglikelihood(self, requests: list[Any]) -> Scores:
        scores = []
        for request in tqdm(requests, disable=self.rank != 0, desc="Scoring"):
            _, continuation, _, doc_id, task, split = request.args
            if not isinstance(continuation, str):
                continuation = str(continuation(self._doc(task, split, doc_id)))
            scores.append(self.model.score(self._question(request.args), continuation))
        self.model.save()
        return scores

    def _question(self, arguments: Arguments) -> TaskQuestion:
        context, settings, visuals, *_, doc_id, task, split = arguments
        messages = partial(self._messages, context, visuals, doc_id, task, split)
        return TaskQuestion(task, f"document {doc_id}", messages, settings)

    def _round(self, arguments: Arguments, state: dict[str, Any]) -> Round:
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
    """One user message of a text and its visuals, and whether ``<image>`` was removed because its number is wrong."""
    media: dict[str, list[Any]] = {"image": [], "video": []}
    for part in map(_part_of, visuals):
        media[part["type"]].append(part[part["type"]])
    pictures = len(media["image"])
    removes = text.count("<image>") not in (0, pictures)
    if removes:
        text = text.replace("<image>", "")
    numbers = {} if "<image>" in text else {number + 1: number for number in range(pictures)}
    first, (content,) = placed([text], media, numbers, _MARKS)
    shown = [*first, *(part for part in content if part.get("text") != "")]
    return [{"role": "user", "content": shown}], removes


def _conversation(messages: Any) -> Messages:
    """A conversation from the messages of a task, in lmms-eval's form."""
    conversation = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            content = [_part_of(item, is_text=isinstance(item, str)) for item in content]
        conversation.append({"role": message.get("role"), "content": content})
    return conversation


def _part_of(item: Any, is_text: bool = False) -> Part:
    """Message part of one text, picture or video."""
    kind = "video"
    if isinstance(item, Mapping):
        if item.get("type") == "text":
            return {"type": "text", "text": str(item.get("text", ""))}
        if isinstance(item.get("url"), Mapping):  # a table with the bounds of the clip instead of the path
            item = {**item, "url": None, **item["url"]}
        for name in ("video_start", "video_end", "start_time", "end_time"):
            if item.get(name) is not None:
                raise InputError(f"A part of a video ({name}={item[name]}) is not supported; cut the video first.")
        named = (item.get(name) for name in ("url", "path", "image", "video"))
        sources = [source for source in named if source is not None]
        if item.get("type") == "audio" or "sampling_rate" in item:
            raise InputError("The task passes audio, which Saccade's models do not accept; choose another task.")
        if not sources:
            raise InputError(f"A task's visual with the keys {', '.join(map(str, item))} has neither url nor path.")
        part = _part_of(sources[0])
        kind = item["type"] if item.get("type") in ("image", "video") else part["type"]
        return {"type": kind, kind: sources[0]}
    if is_text:
        return {"type": "text", "text": item}
    if isinstance(item, (str, PurePath)):
        ending = PurePath(item).suffix.lower()
        if ending in SOUND_ENDINGS:
            raise InputError(f"{item} is audio, which Saccade's models do not accept; choose another task.")
        if ending in IMAGES or str(item).startswith("data:image/"):
            kind = "image"
    elif isinstance(item, Image.Image) or (isinstance(item, np.ndarray) and item.ndim == 3):
        kind = "image"
    elif not isinstance(item, (list, tuple, np.ndarray)):
        expected = "a PIL image, an array, a list of frames, or a path"
        raise InputError(f"A task's visual of type {type(item).__name__} is not usable; expected {expected}.")
    return {"type": kind, kind: item}
