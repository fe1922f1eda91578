"""Saccade's models in lmms-eval: any method on its tasks, with the speed beside the scores.

lmms-eval imports this module when ``--model saccade`` is chosen; nothing else does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from lmms_eval.api.instance import GenerationResult, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from loguru import logger
from tqdm import tqdm

from saccade.errors import InputError
from saccade.evaluators.evaluated_model import Ask, EvaluatedModel, Reply
from saccade.evaluators.lmms_media import conversation, with_visuals
from saccade.evaluators.tallies import Tally
from saccade.inputs.requests import Messages

NO_TEMPLATE = (
    "--apply_chat_template is not for the model saccade, which always applies the checkpoint's chat template to the "
    "task's messages; leave it out."
)


class _Saccade(lmms):
    """Base of the chat and the simple model."""

    def __init__(self, max_batch_size: Any = None, **given: Any) -> None:
        super().__init__()
        rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self._rank, self._world_size = rank, processes
        if processes > 1 and torch.cuda.is_available() and given.get("device") in (None, "cuda"):
            given["device"] = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        self.model = EvaluatedModel(given, logger.warning, ("target", "pretrained"), rank)
        self.device = self.model.vlm.target.device

    @property
    def chat_template(self) -> Any:
        """Refused: see `NO_TEMPLATE`."""
        raise InputError(NO_TEMPLATE)

    def clean(self) -> None:
        """Free caches and models before a local judge takes their place."""
        self.model.close()
        super().clean()

    def _doc(self, task: str, split: str, doc_id: int) -> Any:
        return self.task_dict[task][split][doc_id]

    def _answers(self, asks: Sequence[Ask], title: str) -> list[Reply]:
        """Answer questions, and log their speed where lmms-eval collects it for its results."""
        before = self.model.speed.total
        with tqdm(total=len(asks), disable=self.rank != 0, desc=title) as bar:
            replies = self.model.replies(asks, bar.update)
        _log(before, self.model.speed.total)
        for task, tally in self.model.speed.tasks.items():
            logger.info(f"Speed of {task}: {tally}.")
        return replies

    def _rounds(self, requests: Sequence[Any], ask: Callable[..., Any]) -> list[list[str]]:
        """Run multi-round requests: all questions of a round share the batch."""
        answers: list[list[str]] = [[] for _ in requests]
        notes: list[Any] = [None] * len(requests)
        active, number = list(range(len(requests))), 0
        while active:
            asks = []
            for place in list(active):
                found, notes[place] = ask(requests[place], number, answers[place], notes[place])
                if found is None:
                    active.remove(place)
                else:
                    asks.append(found)
            replies = self._answers(asks, f"Round {number + 1}") if asks else []
            for place, reply in zip(active, replies, strict=True):
                answers[place].append(reply.text)
            number += 1
        return answers


class SaccadeChat(_Saccade):
    """A model that is given the messages of each task, with pictures in their places."""

    is_simple = False

    def generate_until(self, requests: list[Any]) -> list[Any]:
        """Answer requests; their arguments are context, function of messages, settings, document, task and split."""
        return [_result(reply) for reply in self._answers([self._ask(r.args) for r in requests], "Answering")]

    def generate_until_multi_round(self, requests: list[Any]) -> list[list[str]]:
        """Answer every round of requests; the function that makes messages is given the answers so far."""
        return self._rounds([request.args for request in requests], self._round)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Refuse: lmms-eval scores continuations with simple models only."""
        raise InputError("lmms-eval scores continuations with simple models only; give --force_simple as well.")

    def _ask(self, given: Sequence[Any], make: Callable[[], Messages] | None = None) -> Ask:
        _, doc_to_messages, settings, doc_id, task, split = given
        messages = make or (lambda: conversation(doc_to_messages(self._doc(task, split, doc_id))))
        return Ask(task, f"document {doc_id}", messages, settings)

    def _round(self, given: Sequence[Any], number: int, answers: list[str], notes: Any) -> tuple[Ask | None, Any]:
        if number == 0:
            return self._ask(given), notes
        _, doc_to_messages, _, doc_id, task, split = given
        told = {"round_idx": number, "previous_output": list(answers), "previous_round_info": notes}
        found = doc_to_messages(self._doc(task, split, doc_id), **told)
        if not (isinstance(found, tuple) and len(found) == 4) or found[1]:
            return None, notes
        return self._ask(given, partial(conversation, found[0])), found[3]


class SaccadeSimple(_Saccade):
    """A model that is given a text and a list of pictures or videos, and also scores continuations."""

    is_simple = True

    def generate_until(self, requests: list[Any]) -> list[Any]:
        """Answer requests; their arguments are context, settings, function of visuals, document, task and split."""
        asks = []
        for context, settings, doc_to_visual, doc_id, task, split in (request.args for request in requests):
            messages = partial(self._messages, context, doc_to_visual, doc_id, task, split)
            asks.append(Ask(task, f"document {doc_id}", messages, settings))
        return [_result(reply) for reply in self._answers(asks, "Answering")]

    def generate_until_multi_round(self, requests: list[Any]) -> list[list[str]]:
        """Answer every round of requests; the function that makes the text is given the answers so far."""
        return self._rounds([request.args for request in requests], self._round)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Score continuations."""
        found = []
        for given in tqdm([request.args for request in requests], disable=self.rank != 0, desc="Scoring"):
            context, wanted, doc_to_visual, doc_id, task, split = given
            continuation = wanted if isinstance(wanted, str) else str(wanted(self._doc(task, split, doc_id)))
            messages = partial(self._messages, context, doc_to_visual, doc_id, task, split)
            found.append(self.model.score(task, f"document {doc_id}", messages, continuation))
        self.model.speed.save()
        return found

    def _messages(self, context: Any, doc_to_visual: Any, doc_id: int, task: str, split: str) -> Messages:
        visuals = doc_to_visual(self._doc(task, split, doc_id)) if callable(doc_to_visual) else doc_to_visual
        messages, has_removed = with_visuals(_text(context), _listed(visuals))
        if has_removed:
            self.model.report(
                f"Task {task} has <image> in its text more or less often than pictures; it was taken out, and the "
                "pictures come first."
            )
        return messages

    def _round(self, given: Sequence[Any], number: int, answers: list[str], notes: Any) -> tuple[Ask | None, Any]:
        context, settings, doc_to_visual, doc_to_text, doc_id, task, split = given
        visuals = doc_to_visual
        if number > 0:
            told = {"round_idx": number, "previous_output": list(answers), "previous_round_info": notes}
            found = doc_to_text(self._doc(task, split, doc_id), **told)
            if not (isinstance(found, tuple) and len(found) == 5) or found[2]:
                return None, notes
            visuals, context, _, _, notes = found
        messages = partial(self._messages, context, visuals, doc_id, task, split)
        return Ask(task, f"document {doc_id}, round {number + 1}", messages, settings), notes


def _text(context: Any) -> str:
    if not isinstance(context, str):
        raise InputError(f"The task's text is of type {type(context).__name__}; expected a string.")
    return context


def _listed(visuals: Any) -> list[Any]:
    """The visuals of one question; tasks without any give None."""
    if visuals is None:
        return []
    return list(visuals) if isinstance(visuals, (list, tuple)) else [visuals]


def _result(reply: Reply) -> Any:
    counts = TokenCounts(input_tokens=reply.prompt_tokens, output_tokens=reply.new_tokens)
    return GenerationResult(text=reply.text, token_counts=counts)


def _log(before: Tally, after: Tally) -> None:
    """Pass the speed of the answers since ``before`` to lmms-eval, which writes it into its results."""
    new = Tally(**{name: getattr(after, name) - getattr(before, name) for name in Tally.__slots__})
    if not new.answers:
        return
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
