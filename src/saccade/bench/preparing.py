"""Suite resolved against the loaded models: usable methods, prompts, and omissions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from saccade import methods
from saccade.bench import judge, questions
from saccade.bench.answering import constraint
from saccade.bench.questions import Question, digest
from saccade.bench.suites import MethodEntry, Suite
from saccade.draft.heads.head import Head
from saccade.environment import dtype_name, environment, fingerprint, model_facts
from saccade.errors import InputError, MethodError, SaccadeError
from saccade.inputs.processor import MediaOptions
from saccade.model_spec import ModelSpec
from saccade.vlm import VLM


@dataclass(frozen=True, slots=True)
class Prepared:
    """Suite ready to run."""

    suite: Suite  # as requested
    vlm: VLM  # the loaded models
    methods: Mapping[str, VLM]  # by label, the baseline first; all share the loaded models
    questions: Mapping[str, list[Question]]  # by task
    missing: tuple[str, ...]  # one sentence per omission
    spec: ModelSpec  # of the models, as the user gave it
    places: Mapping[str, Any] = field(default_factory=dict)  # as in `saccade.bench.records.Header`

    @property
    def options(self) -> dict[str, Any]:
        """Generation options of every answer."""
        sampling = self.suite.sampling
        return {"max_new_tokens": self.suite.max_new_tokens, "do_sample": bool(sampling), **sampling}

    @property
    def compares_tokens(self) -> bool:
        """Whether lossless methods must produce plain decoding's tokens: not when sampling."""
        return not self.suite.sampling

    @property
    def answers(self) -> int:
        """Records of a complete run."""
        turns = sum(len(q.turns) for group in self.questions.values() for q in group)
        return turns * len(self.methods) * self.suite.repeats

    def config(self) -> dict[str, Any]:
        """Resolved configuration, as read back from JSON."""
        resolved = {
            **self.suite.as_dict(),
            "tasks": [t for t in self.suite.as_dict()["tasks"] if t["name"] in self.questions],
            "methods": [self._resolved(m) for m in self.suite.methods if m.label in self.methods],
            "prompts": {task: {"count": len(group), "digest": digest(group)} for task, group in self.questions.items()},
            "missing": list(self.missing),
        }
        for task in resolved["tasks"]:
            task.pop("media")  # places of files do not identify a run
        resolved["judge"] = judge.facts(self.suite.judge)
        return as_json(resolved)

    def _resolved(self, entry: MethodEntry) -> dict[str, Any]:
        """Method with its defaults filled in, and the bounds of its trees (nodes include the root)."""
        vlm = self.methods[entry.label]
        drafter = vlm.engine.drafter
        return {
            "name": entry.name,
            "label": entry.label,
            "options": dict(vlm.options),
            "lossless": vlm.lossless,
            "needs": methods.needs(vlm.options),
            "head": vlm.head_name,
            "max_nodes": drafter.facts.max_nodes if drafter else 1,
            "max_depth": drafter.facts.max_depth if drafter else 0,
        }

    def models(self) -> dict[str, Any]:
        """Facts about target, draft model and used heads, with digests of their weights."""
        exact = {"executor": self.vlm.target.executor.name} | ({"exact": True} if self.vlm.target.exact else {})
        facts = {"target": model_facts(self.vlm.target.model, self.spec.target) | exact, "drafter": None}
        if self.vlm.draft_model is not None:
            facts["drafter"] = model_facts(self.vlm.draft_model.model, self.spec.drafter or self.spec.target)
        facts["heads"] = {
            name: {
                "name": name,
                "type": head.kind,
                "parameters": sum(p.numel() for p in head.parameters()),
                "layers": head.blocks,
                "width": head.config.hidden_size,
                "vocabulary": head.config.vocab_size,
                "options": dict(head.config.options),
                "digest": fingerprint(head),
                "dtype": dtype_name(head),
            }
            for name, head in self.heads.items()
        }
        return as_json(facts)

    @property
    def heads(self) -> dict[str, Head]:
        """Heads that a method drafts with, by name."""
        used = [(vlm.head_name, vlm.head) for vlm in self.methods.values()]
        return {name: head for name, head in used if name is not None and head is not None}

    def environment(self) -> dict[str, Any]:
        """Facts about software and machine."""
        return as_json(environment(self.vlm.target.device))


def prepare(
    suite: Suite,
    vlm: VLM,
    spec: ModelSpec | None = None,
    places: Mapping[str, Any] | None = None,
    gathered: questions.Gathered | None = None,
) -> Prepared:
    """Resolve a suite against the loaded models."""
    usable: dict[str, VLM] = {}
    missing: list[str] = []
    for entry in suite.methods:
        reason = lacking(entry)
        try:
            if reason:
                raise MethodError(reason)
            usable[entry.label] = vlm.using(entry.name, head=entry.head, **entry.options)
        except MethodError as problem:  # also one that needs another drafter or head than those that are loaded
            if not entry.optional:
                raise
            missing.append(f"Method {entry.label}: {problem}")
    if len(usable) == 1 and len(suite.methods) > 1:
        missing.append("No method but plain decoding is left.")
    groups, absent = gathered or questions.gather(suite)
    groups = dict(groups)
    absent = dict(absent)
    for task in suite.tasks:
        try:
            for question in groups.get(task.name, ()):
                options = MediaOptions(**question.reading)
                constraint(vlm, question)
                vlm.target.traits.limits.check(len(vlm.processor.prompt(question.turns[0].messages, options=options)))
        except InputError as problem:  # the prompt's length included
            if not task.optional:
                raise InputError(f"This model cannot run task {task.name}: {problem}") from problem
            absent[task.name] = str(problem)
            del groups[task.name]
    if not groups:
        raise SaccadeError(
            f"Suite {suite.name} has no usable task: {' '.join(absent.values())} Choose others with --tasks."
        )
    missing += [f"Task {task}: {reason}" for task, reason in absent.items()]
    for name, times in Counter(q.id for group in groups.values() for q in group).items():
        if times > 1:
            raise SaccadeError(f"Suite {suite.name} contains {name} twice.")
    return Prepared(suite, vlm, usable, groups, tuple(missing), spec or ModelSpec(""), places or {})


def as_json(content: dict[str, Any]) -> dict[str, Any]:
    """Content as read back from JSON: tuples as lists, keys as strings."""
    read: dict[str, Any] = json.loads(json.dumps(content, default=str))
    return read


def lacking(entry: MethodEntry) -> str:
    """Reason why this version of Saccade lacks a method with these options; empty when it has it."""
    try:
        methods.options(entry.name, entry.options)
    except MethodError as problem:
        return str(problem)
    return ""
