"""A language or vision-language model that grades answers, behind any OpenAI-compatible endpoint."""

from __future__ import annotations

import base64
import json
import os
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import IncompleteRead
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from saccade.data.template import Template
from saccade.errors import InputError, SaccadeError
from saccade.typed import check_whole, make

TEMPLATE = """Grade an answer to a question.

Question: {question}
Reference answer: {reference}
Answer to grade: {answer}

Give {high} if the answer says the same as the reference, {low} if it is wrong or empty, and a number between them if \
it is partly right. Reply with the number only."""
_PLACES = ("url", "key_env", "concurrency", "retries", "timeout")
"""Fields that do not change a grade."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_NAMED = re.compile(r"(?:score|rating|grade)\W{0,8}?(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_THOUGHTS = re.compile(r"^.*</think>|<think>.*", re.DOTALL)  # servers may leave out either end
_LONGEST_WAIT = 60.0
_TEMPORARY = (408, 409, 425, 429, 500, 502, 503, 504, 529)


@dataclass(frozen=True, slots=True)
class Judge:
    """A judge."""

    url: str  # base of the endpoint, such as `https://api.openai.com/v1`
    model: str  # its name there
    template: str = TEMPLATE  # prompt with `{question}`
    low: float = 0
    high: float = 10
    pictures: bool = False  # show it the pictures of the question
    key_env: str = "OPENAI_API_KEY"  # environment variable of the key; no key is sent where it is not set
    max_tokens: int = 256  # longest reply
    concurrency: int = 4  # requests at once
    retries: int = 5  # further attempts after a passing fault
    timeout: float = 120.0  # seconds of one attempt

    @property
    def needs_reference(self) -> bool:
        """Whether its prompt names the right answer."""
        return "reference" in Template(self.template).names

    def messages(self, fields: Mapping[str, Any], pictures: Sequence[Path]) -> list[dict[str, Any]]:
        """Return the request for one grade."""
        text = Template(self.template).fill({"low": f"{self.low:g}", "high": f"{self.high:g}", **fields})
        shown = [_picture(path) for path in pictures] if self.pictures else []
        return [{"role": "user", "content": [*shown, {"type": "text", "text": text}] if shown else text}]

    def ask(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the reply; passing faults are tried again after 1, 2, 4, ... seconds, or when the endpoint says."""
        for attempt in range(self.retries + 1):
            try:
                return self._ask_once(messages)
            except _PassingFault as fault:
                if attempt == self.retries:
                    raise SaccadeError(
                        f"The judge at {self.url} did not answer in {self.retries + 1} attempts: {fault}; "
                        "the answers are on disk, and the same command asks for the missing grades."
                    ) from fault
                time.sleep(min(fault.wait if fault.wait is not None else 2.0**attempt, _LONGEST_WAIT))
        raise AssertionError("unreachable")

    def score(self, reply: str) -> float | None:
        """Place of the reply's number in the range, 0 to 1; None where it has none in the range.

        A number behind the word score, rating or grade counts first; thoughts in ``<think>`` and mentions of the range
        itself ("from 0 to 10", "out of 10") do not.
        """
        low, high = (re.escape(f"{end:g}") for end in (self.low, self.high))
        scale = rf"(?<![\d.]){low}\s*(?:-|–|to)\s*{high}(?![\d.]*\d)|\bout of {high}(?![\d.]*\d)"
        text = re.sub(scale, "", _THOUGHTS.sub("", reply), flags=re.IGNORECASE)
        found = [*(m[1] for m in _NAMED.finditer(text)), *_NUMBER.findall(text)]
        number = next((float(n) for n in found if self.low <= float(n) <= self.high), None)
        return None if number is None else (number - self.low) / (self.high - self.low)

    def _ask_once(self, messages: Sequence[Mapping[str, Any]]) -> str:
        key = os.environ.get(self.key_env)
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": self.max_tokens}
        request = Request(
            f"{self.url.rstrip('/')}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})},
        )
        try:
            with urlopen(request, timeout=self.timeout) as response:
                found = json.loads(response.read())
            return str(found["choices"][0]["message"]["content"] or "")
        except HTTPError as problem:
            said = _said(problem)
            if problem.code in _TEMPORARY:
                raise _PassingFault(f"{problem.code} {said}", _wait(problem)) from problem
            hint = f"; set its key in the variable {self.key_env}" if problem.code in (401, 403) else ""
            raise SaccadeError(
                f"The judge at {self.url} refused the request ({problem.code}): {said}{hint}."
            ) from problem
        except (URLError, TimeoutError, ConnectionError, IncompleteRead) as problem:
            raise _PassingFault(str(getattr(problem, "reason", problem)), None) from problem
        except (ValueError, KeyError, IndexError, TypeError) as problem:
            form = "another form than OpenAI's chat completions"
            raise SaccadeError(f"The judge at {self.url} replied in {form}.") from problem


class _PassingFault(Exception):
    """Fault that may be gone after ``wait`` seconds; None where the endpoint did not say."""

    def __init__(self, words: str, wait: float | None) -> None:
        super().__init__(words)
        self.wait = wait


def parse(table: Mapping[str, Any], where: str) -> Judge:
    """Make a judge of a table."""
    judge = make(Judge, table, where)
    Template(judge.template)
    if urlsplit(judge.url).scheme not in ("http", "https"):
        raise InputError(f"{where}: url must begin with http:// or https://, not {judge.url!r}.")
    if judge.low >= judge.high:
        raise InputError(f"{where}: low must be below high, not {judge.low:g} and {judge.high:g}.")
    for name, least in (("concurrency", 1), ("retries", 0), ("max_tokens", 1)):
        check_whole(getattr(judge, name), least, name, where, InputError)
    return judge


def from_file(path: str) -> dict[str, Any]:
    """Read the table of a judge from a TOML file, and check it."""
    try:
        table = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as problem:
        raise SaccadeError(f"Cannot read the judge {path}: {problem.strerror}.") from problem
    except ValueError as problem:
        raise SaccadeError(f"{path} is not valid TOML: {str(problem).strip()}") from problem
    parse(table, path)
    return table


def facts(table: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the grades of a judge: all but where it is and how it is asked."""
    return {name: value for name, value in table.items() if name not in _PLACES}


def _picture(path: Path) -> dict[str, Any]:
    content = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}


def _said(problem: HTTPError) -> str:
    """The endpoint's own words."""
    try:
        body = problem.read().decode(errors="replace")
    except OSError:
        return str(problem.reason)
    try:
        found = json.loads(body)
        error = found.get("error", found) if isinstance(found, dict) else found
        body = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        pass
    return " ".join(body.split())[:200].rstrip(".") or str(problem.reason)


def _wait(problem: HTTPError) -> float | None:
    try:
        return max(0.0, float(problem.headers.get("Retry-After", "")))
    except ValueError:
        return None
