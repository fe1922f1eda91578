"""A language or vision-language model that grades answers, at any OpenAI-compatible endpoint."""

from __future__ import annotations

import base64
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from saccade.data.conversations import Template
from saccade.errors import InputError, SaccadeError
from saccade.options import check_whole, make

TEMPLATE = """Grade an answer to a question.

Question: {question}
Reference answer: {reference}
Answer to grade: {answer}

Give {high} if the answer says the same as the reference, {low} if it is wrong or empty, and a number between them if \
it is partly right. Reply with the number only."""
_PLACES = ("url", "key_env", "concurrency", "retries", "timeout")  # fields that do not change a grade
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_NAMED = re.compile(r"(?:score|rating|grade)\W{0,8}?(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_THOUGHTS = re.compile(r"^.*</think>|<think>.*", re.DOTALL)  # servers may leave out either end


@dataclass(frozen=True, slots=True)
class JudgeModel:
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
        return "reference" in Template(self.template).names

    def messages(self, fields: Mapping[str, Any], pictures: Sequence[Path]) -> list[dict[str, Any]]:
        """Return the request for one grade."""
        text = Template(self.template).fill({"low": f"{self.low:g}", "high": f"{self.high:g}", **fields})
        content: list[dict[str, Any]] = []
        for path in pictures if self.pictures else ():
            url = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
            content.append({"type": "image_url", "image_url": {"url": url}})
        return [{"role": "user", "content": [*content, {"type": "text", "text": text}] if content else text}]

    def client(self) -> Any:
        """Return a client of the endpoint, which repeats requests after passing faults."""
        try:
            import openai
        except ImportError as problem:
            raise SaccadeError("A judge needs the package openai: pip install 'saccade[judge]'.") from problem
        key = os.environ.get(self.key_env) or "none"
        return openai.OpenAI(base_url=self.url, api_key=key, timeout=self.timeout, max_retries=self.retries)

    def ask(self, client: Any, messages: Sequence[Mapping[str, Any]]) -> str:
        import openai

        try:
            reply = client.chat.completions.create(
                model=self.model,
                messages=messages,
                temperature=0,
                max_tokens=self.max_tokens,
                extra_headers={} if os.environ.get(self.key_env) else {"Authorization": openai.Omit()},
            )
            return str(reply.choices[0].message.content or "")
        except (openai.APIConnectionError, openai.RateLimitError, openai.InternalServerError) as problem:
            status = f"{problem.status_code} " if isinstance(problem, openai.APIStatusError) else ""
            raise SaccadeError(
                f"The judge at {self.url} did not answer in {self.retries + 1} attempts: {status}{_words(problem)}; "
                "the answers are on disk, and the same command asks for the missing grades."
            ) from problem
        except openai.APIStatusError as problem:
            hint = f"; set its key in the variable {self.key_env}" if problem.status_code in (401, 403) else ""
            raise SaccadeError(
                f"The judge at {self.url} refused the request ({problem.status_code}): {_words(problem)}{hint}."
            ) from problem
        except (openai.OpenAIError, ValueError, AttributeError, IndexError, TypeError) as problem:
            form = "another form than OpenAI's chat completions"
            raise SaccadeError(f"The judge at {self.url} replied in {form}.") from problem

    def score(self, reply: str) -> float | None:
        """Place of the reply's number in the range, 0 to 1; None where it has none in the range.

        A number after the word score, rating or grade counts first; thoughts in ``<think>`` and mentions of the range
        itself ("from 0 to 10", "out of 10") do not.
        """
        low, high = (re.escape(f"{end:g}") for end in (self.low, self.high))
        scale = rf"(?<![\d.]){low}\s*(?:-|–|to)\s*{high}(?![\d.]*\d)|\bout of {high}(?![\d.]*\d)"
        text = re.sub(scale, "", _THOUGHTS.sub("", reply), flags=re.IGNORECASE)
        numbers = [*(m[1] for m in _NAMED.finditer(text)), *_NUMBER.findall(text)]
        number = next((float(n) for n in numbers if self.low <= float(n) <= self.high), None)
        return None if number is None else (number - self.low) / (self.high - self.low)


def parse(table: Mapping[str, Any], where: str) -> JudgeModel:
    judge = make(JudgeModel, table, where)
    Template(judge.template)
    if urlsplit(judge.url).scheme not in ("http", "https"):
        raise InputError(f"{where}: url must begin with http:// or https://, not {judge.url!r}.")
    if judge.low >= judge.high:
        raise InputError(f"{where}: low must be below high, not {judge.low:g} and {judge.high:g}.")
    for name, least in (("concurrency", 1), ("retries", 0), ("max_tokens", 1)):
        check_whole(getattr(judge, name), least, name, where, InputError)
    return judge


def read_table(path: str | Path, what: str) -> dict[str, Any]:
    """Read a TOML file of the user."""
    try:
        return tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        raise SaccadeError(f"Cannot read the {what} {path}: {reason}.") from problem
    except ValueError as problem:
        raise SaccadeError(f"{path} is not valid TOML: {str(problem).strip()}") from problem


def from_file(path: str) -> dict[str, Any]:
    """Read the table of a judge from a TOML file, and check it."""
    table = read_table(path, "judge")
    parse(table, path)
    return table


def facts(table: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that decide the grades: all but where the judge is and how requests reach it."""
    return {name: value for name, value in table.items() if name not in _PLACES}


def _words(problem: Any) -> str:
    """The endpoint's message, or what kept the request from it."""
    body = getattr(problem, "body", None)
    message = body.get("message") if isinstance(body, Mapping) else None
    return " ".join(str(message or problem.__cause__ or problem).split())[:200].rstrip(".")
