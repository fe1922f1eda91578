"""Small stand-ins for the interfaces of lmms-eval and VLMEvalKit, in whose place the plug-ins are tested.

The orders of arguments are written down here as the evaluators have them (lmms-eval 0.7.3, VLMEvalKit 0.2rc1), and are
not shared with the plug-ins: a plug-in that mixes them up fails.
"""

from __future__ import annotations

import abc
import copy
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

TokenCounts = namedtuple("TokenCounts", "input_tokens output_tokens", defaults=(None, None))
GenerationResult = namedtuple("GenerationResult", "text token_counts", defaults=(None,))
Instance = namedtuple("Instance", "args")
"""A request, whose arguments are in the order of the kind of model."""


class Lmms(abc.ABC):
    """lmms-eval's base class of models, as far as the evaluator uses it."""

    is_simple = True

    def __init__(self) -> None:
        self._rank, self._world_size, self.task_dict = 0, 1, {}

    @abc.abstractmethod
    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]: ...

    @abc.abstractmethod
    def generate_until(self, requests: list[Any]) -> list[Any]: ...

    @abc.abstractmethod
    def generate_until_multi_round(self, requests: list[Any]) -> list[Any]: ...

    @classmethod
    def create_from_arg_string(cls, given: str, more: dict[str, Any]) -> Any:
        pairs = (entry.split("=", 1) for entry in given.split(","))
        words = {"True": True, "False": False}
        values = {name: words.get(v, int(v) if v.isnumeric() else v) for name, v in pairs}
        return cls(**values, **{name: value for name, value in more.items() if value is not None})

    @property
    def rank(self) -> int:
        return self._rank

    def clean(self) -> None:
        self.task_dict = {}


@dataclass
class Logs:
    """Sentences and metrics that the plug-in logs."""

    sentences: list[str]
    metrics: list[dict[str, Any]]

    def warning(self, text: str) -> None:
        self.sentences.append(text)

    info = warning


@dataclass
class Task:
    """A task of lmms-eval with documents, and its requests as `construct_requests` makes them."""

    name: str
    docs: list[dict[str, Any]]
    doc_to_text: Callable[[dict[str, Any]], str]
    doc_to_visual: Callable[[dict[str, Any]], Any]
    settings: dict[str, Any]

    def doc_to_messages(self, doc: dict[str, Any]) -> list[dict[str, Any]]:
        kinds = [("video" if isinstance(v, (str, list)) else "image", v) for v in self.doc_to_visual(doc)]
        content = [{"type": kind, "url": visual} for kind, visual in kinds]
        return [{"role": "user", "content": [*content, {"type": "text", "text": self.doc_to_text(doc)}]}]

    def chat(self, model: Any) -> list[Instance]:
        return self._requests(model, lambda doc: ("the context", self.doc_to_messages, copy.deepcopy(self.settings)))

    def simple(self, model: Any) -> list[Instance]:
        return self._requests(
            model, lambda doc: (self.doc_to_text(doc), copy.deepcopy(self.settings), self.doc_to_visual)
        )

    def _requests(self, model: Any, first: Callable[[Any], tuple[Any, ...]]) -> list[Instance]:
        model.task_dict[self.name] = {"test": self.docs}
        return [Instance((*first(doc), number, self.name, "test")) for number, doc in enumerate(self.docs)]

    def continuations(self, model: Any, choices: list[str], number: int = 0) -> list[Instance]:
        model.task_dict[self.name] = {"test": self.docs}
        text = self.doc_to_text(self.docs[number])
        return [Instance((text, f" {c}", self.doc_to_visual, number, self.name, "test")) for c in choices]


def _module(patch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(content)
    patch.setitem(sys.modules, name, module)
    parent, _, own = name.rpartition(".")
    if parent in sys.modules:
        patch.setattr(sys.modules[parent], own, module, raising=False)


class Bar(list):  # type: ignore[type-arg]
    """A progress bar."""

    def __init__(self, items: Any = (), **_: Any) -> None:
        super().__init__(items)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, count: int = 1) -> None: ...


def install_lmms_eval(patch: pytest.MonkeyPatch) -> Logs:
    """Put the stand-in for lmms-eval in the place of the package."""
    logs = Logs([], [])
    for name in ("lmms_eval", "lmms_eval.api", "lmms_eval.models", "lmms_eval.models.model_utils"):
        _module(patch, name)
    _module(patch, "lmms_eval.api.instance", GenerationResult=GenerationResult, TokenCounts=TokenCounts)
    _module(patch, "lmms_eval.api.model", lmms=Lmms)
    _module(patch, "lmms_eval.models.registry_v2", ModelManifest=SimpleNamespace)
    _module(patch, "lmms_eval.models.model_utils.gen_metrics", log_metrics=lambda **given: logs.metrics.append(given))
    _module(patch, "loguru", logger=logs)
    _module(patch, "tqdm", tqdm=Bar)
    patch.delitem(sys.modules, "saccade.evaluators.lmms_models", raising=False)
    return logs


class BaseModel:
    """VLMEvalKit's base class of models, as far as the evaluator uses it."""

    allowed_types = ("text", "image", "video")

    def __init__(self) -> None:
        self.dump_image_func = None

    def generate(self, message: list[dict[str, Any]], dataset: str | None = None) -> str:
        assert all(item["type"] in self.allowed_types for item in message)
        return str(self.generate_inner(message, dataset))  # type: ignore[attr-defined]


def install_vlmevalkit(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Put the stand-in for VLMEvalKit in the place of the package, and return its table of models."""
    supported: dict[str, Any] = {}
    _module(patch, "vlmeval")
    _module(patch, "vlmeval.config", supported_VLM=supported)
    _module(patch, "vlmeval.vlm")
    _module(patch, "vlmeval.vlm.base", BaseModel=BaseModel)
    return supported
