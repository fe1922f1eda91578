"""Answers, heads and draft VLMs by name, read from recipes.toml, and their `saccade` commands."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from saccade.distill.planning import PREFIX, tasks_of
from saccade.draft.heads.head import HeadConfig
from saccade.draft.heads.registry import DRAFT_VLM, part_of
from saccade.errors import InputError
from saccade.options import check_keys, make
from saccade.target_model.adapter import Target
from saccade.train.recipe import Recipe, read_recipe
from saccade.wording import count as counted

FILE = Path(__file__).with_name("recipes.toml")


@dataclass(frozen=True, slots=True)
class AnswerSet:
    """Answers of the target to pocket prompts, in a folder of `answers`."""

    name: str
    tasks: str  # comma-separated; `all` for those that drafters are trained on
    without: str = ""  # tasks left out of them
    count: int = 0  # samples of every task
    max_new_tokens: int = 256  # longest answer
    grammar: str = "dense"  # of the prompts

    @property
    def listed(self) -> list[str]:
        """Tasks by name."""
        left_out = self.without.split(",")
        return [task for task in tasks_of(PREFIX + self.tasks, self.grammar) if task not in left_out]

    @property
    def source(self) -> str:
        """Prompts as `saccade distill` takes them."""
        return PREFIX + ("all" if self.tasks == "all" and not self.without else ",".join(self.listed))

    @property
    def place(self) -> Path:
        """Its folder within that of all answers and heads."""
        return Path("answers", self.name)

    @property
    def made_of(self) -> dict[str, Any]:
        """Settings that they depend on, as `distill` takes them."""
        sizes = {"count": self.count, "max_new_tokens": self.max_new_tokens}
        return {"source": self.source, "grammar": self.grammar, **sizes}

    def __str__(self) -> str:
        # an earlier turn of a conversation is a question of its own
        return f"{self.name}: {self.count * len(self.listed):,} prompts of {counted(len(self.listed), 'task')}"


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A head or draft VLM to train, in a folder of `heads`."""

    name: str  # also in the suites
    kind: str  # of the head, or `draft-vlm`
    data: str  # name of its answers
    settings: Mapping[str, Any] = field(default_factory=dict)  # that differ from the kind's recipe

    @property
    def recipe(self) -> Recipe:
        return read_recipe(self.kind).with_settings(self.settings)

    @property
    def place(self) -> Path:
        """Its folder within that of all answers and heads."""
        return Path("heads", self.name)

    @property
    def made_of(self) -> dict[str, Any]:
        """Settings that it depends on."""
        return {"recipe": self.recipe.as_dict()}

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}, {self.recipe.steps:,} steps on the answers {self.data!r}"

    def features(self, target: Target) -> str:
        """Name of the states that it reads, none of a draft VLM; heads of the same name share a cache of them."""
        recipe = self.recipe
        if recipe.kind == DRAFT_VLM:
            return ""
        config = HeadConfig.from_target(target, recipe.kind, **recipe.head)
        made_of = part_of(recipe.kind, "feeder").dependencies(config, recipe.objective)
        return "-".join(map(str, [self.data, recipe.min_words, recipe.max_tokens, *made_of]))

    def command(self, folder: str, target: str, dtype: str) -> str:
        """`saccade train` command that trains the head alone, in a folder of answers and heads."""
        settings = [word for key, value in self.settings.items() for word in ("--set", f"{key}={_text(value)}")]
        where = ["-t", target, "--dtype", dtype, "--data", f"{folder}/answers/{self.data}"]
        return shlex.join(["saccade", "train", self.kind, *where, "-o", f"{folder}/{self.place}", *settings])


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All answers and heads, by name."""

    answers: Mapping[str, AnswerSet]
    heads: Mapping[str, HeadPlan]

    def chosen(self, names: Iterable[str]) -> Catalogue:
        """Return the heads of these names, all without any, and the answers that they learn from."""
        wanted = list(dict.fromkeys(names)) or list(self.heads)
        for name in wanted:
            if name not in self.heads:
                raise InputError(f"There is no recipe of a head {name!r}; expected some of {', '.join(self.heads)}.")
        heads = {name: self.heads[name] for name in wanted}
        used = {head.data for head in heads.values()}
        return Catalogue({name: answers for name, answers in self.answers.items() if name in used}, heads)

    def scaled(self, steps_by: float, answers_by: float) -> Catalogue:
        """Return the catalogue with so many times as many steps and answers, at least one of each."""

        def times(number: int, factor: float) -> int:
            return max(round(number * factor), 1) if number else 0

        def steps(settings: Mapping[str, Any]) -> dict[str, Any]:
            return {
                key: times(value, steps_by) if key.endswith((".steps", ".warmup")) else value
                for key, value in settings.items()
            }

        answers = {name: replace(a, count=times(a.count, answers_by)) for name, a in self.answers.items()}
        heads = {name: replace(h, settings=steps(h.settings)) for name, h in self.heads.items()}
        return Catalogue(answers, heads)


def read() -> Catalogue:
    """Read the catalogue; settings of all heads, of the kind and of the head itself, later ones preferred."""
    content = tomllib.loads(FILE.read_text(encoding="utf-8"))
    check_keys(content, ("answers", "settings", "kinds", "heads"), FILE.name)
    answers = {
        name: make(AnswerSet, {"name": name, **table}, f"{FILE.name}, answers {name}")
        for name, table in content["answers"].items()
    }
    heads = {}
    for name, table in content["heads"].items():
        kind, data = table.pop("kind", name), table.pop("data", "all")
        if data not in answers:
            raise InputError(f"{FILE.name}: head {name} learns from {data!r}; expected one of {', '.join(answers)}.")
        heads[name] = HeadPlan(name, kind, data, {**content["settings"], **content["kinds"].get(kind, {}), **table})
    return Catalogue(answers, heads)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
