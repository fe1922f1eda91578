"""OpenAI's batch format: requests with bodies of the API, and responses in its form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.data.conversations import resolve
from saccade.engine import Row
from saccade.errors import InputError, SaccadeError
from saccade.inputs.processor import MediaOptions
from saccade.jobs.items import NO_ID, SAME_ID, Item
from saccade.jobs.job import BatchJob, PreparedItem, key_of, seed_of

try:
    from saccade.serve.answers import Form, usage
    from saccade.serve.configuration import Limits, ModelEntry
    from saccade.serve.models import ServedModel
    from saccade.serve.refusals import Refusal
    from saccade.serve.schemas import ChatRequest, CompletionRequest, StreamOptions, checked
except ImportError as problem:
    raise SaccadeError(
        f"OpenAI batch files need the server's packages, of which {problem.name} is missing; run "
        "`pip install saccade[serve]`."
    ) from None

if TYPE_CHECKING:
    from saccade.vlm import VLM

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_MOST_CHOICES = 128
_CODES = {NO_ID: "missing_required_parameter", SAME_ID: "duplicate_custom_id"}
"""OpenAI's names of faults for which a request gets no response."""
_CHOSEN = "a job has one method for all requests; leave it out, and choose the method of the job"


class OpenAIForm:
    """Requests of OpenAI's batch format, which the server's own code turns into rows and answers."""

    def __init__(self, vlm: VLM, job: BatchJob, created: int) -> None:
        options = job.options
        others = sorted(set(options) - {"max_new_tokens"})
        if others:
            raise InputError(
                f"Requests of OpenAI's batch format bring their own options; leave out {', '.join(others)}."
            )
        limits = Limits(default_max_tokens=options.get("max_new_tokens") or Limits().default_max_tokens)
        reading = MediaOptions(text_as_text=job.reading.text_as_text)
        self._model = ServedModel(ModelEntry(target=""), vlm, limits, reading)
        self._vlm, self._seed, self._created = vlm, job.seed, created

    def prepare(self, item: Item) -> PreparedItem:
        if item.problem:
            raise InputError(item.problem)
        try:
            body = self._body(item)
            chat = isinstance(body, ChatRequest)
            jobs = self._model.jobs(body, lambda *_: None)  # the steps of a row wait for its end
        except Refusal as refusal:
            raise InputError(refusal.message) from None

        def record(rows: Sequence[Row]) -> dict[str, Any]:
            choices = self._model.choices(body, jobs)
            for number, (choice, job, row) in enumerate(zip(choices, jobs, rows, strict=True)):
                while row.steps:
                    choice.add(job.event(row, row.steps.pop(0), self._vlm.lossless))
                for place, call in enumerate(choice.calls):
                    call["id"] = _hash(item, f"call {place} of {number}")[:9]
            form = Form(chat, body.model or self._model.entry.label, StreamOptions())
            about = {"method": self._vlm.method, "lossless": self._vlm.lossless}
            whole = json.loads(form.body(choices, usage(choices, body.n), []))
            kind = str(whole["id"]).partition("-")[0]
            named = {**whole, "id": f"{kind}-{_hash(item, 'answer')}", "created": self._created, "saccade": about}
            return _response(item, 200, named)

        def starts(again: bool) -> list[Any]:
            for job in jobs if again else ():
                job.planned = job.plan_again()
            return [(job.request, job.planned.plan) for job in jobs]

        return PreparedItem(starts, record)

    def failure(self, item: Item, sentence: str, is_ours: bool) -> dict[str, Any]:
        if code := _CODES.get(item.problem):
            line = _response(item, 400, {}) | {"custom_id": item.row.get("custom_id"), "response": None}
            return line | {"error": {"code": code, "message": sentence}}
        kind = "server_error" if is_ours else "invalid_request_error"
        error = {"message": sentence, "type": kind, "param": None, "code": None}
        return _response(item, 500 if is_ours else 400, {"error": error})

    def _body(self, item: Item) -> Any:
        row = item.row
        url, fields = row.get("url", _CHAT), row["body"]
        if row.get("method", "POST") != "POST" or url not in (_CHAT, _COMPLETIONS):
            raise InputError(f"expected POST to {_CHAT} or {_COMPLETIONS}, not {row.get('method')} {url}")
        if beside := sorted(set(row) & (set(ChatRequest.model_fields) | set(CompletionRequest.model_fields))):
            raise InputError(f"{beside[0]} beside the body has no effect; move it into the body")
        if not isinstance(fields, dict):
            raise InputError("the body must be a JSON object, such as one with model and messages")
        if url == _CHAT:
            fields = {**fields, "messages": _resolved(fields.get("messages"), item.root)}
        body: Any = checked(ChatRequest if url == _CHAT else CompletionRequest, json.dumps(fields).encode())
        if body.stream:
            raise InputError("the answer of a batch is not streamed; leave out stream")
        if not body.model_fields_set.isdisjoint({"speculation", "saccade"}):
            raise InputError(_CHOSEN)
        if not 1 <= body.answers <= _MOST_CHOICES:
            raise InputError(f"a request may have 1 to {_MOST_CHOICES} answers, not {body.answers}")
        if body.seed is None:
            body.seed = seed_of(self._seed, item.id)
        return body


def _resolved(value: Any, root: Path, is_url: bool = False) -> Any:
    """Messages whose relative paths of media are those of files; what has no such form remains."""
    if isinstance(value, list):
        return [_resolved(entry, root) for entry in value]
    if isinstance(value, dict):
        urls = ("image_url", "video_url", *(["url"] if is_url else []))
        return {key: _resolved(entry, root, key in urls) for key, entry in value.items()}
    if is_url and isinstance(value, str) and value and "://" not in value[:16]:
        return resolve(value, root)
    return value


def _response(item: Item, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{_hash(item, 'request')}", "body": body}
    return {"id": f"batch_req_{_hash(item, 'line')}", "custom_id": item.id, "response": response, "error": None}


def _hash(item: Item, what: str) -> str:
    """Part of an id that is equal in every attempt."""
    return f"{key_of(what, item.id, item.version):016x}"
