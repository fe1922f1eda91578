"""The models of a run and how they run, declared once: for Python, for tables of files and for the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from saccade.options import EXECUTORS, STORED


@dataclass(frozen=True)
class ModelSpec:
    """What `saccade.load` takes; `Annotated` adds help for commands, and the type in commands and tables if other."""

    target: Annotated[Any, "Folder, hub id, profile of `saccade tune`, or `pocket`.", str]
    drafter: Annotated[Any, "A smaller model of the same tokenizer, or a head.", str | None] = None
    method: Annotated[str | None, "See `saccade methods`; by default what fits."] = None
    heads: Annotated[Any, "Another trained head; may be repeated.", Mapping] = field(default_factory=dict)
    head: str | None = None
    adapters: Mapping[str, Any] = field(default_factory=dict)
    dtype: Annotated[Any, "float32, bfloat16, float16 or auto: as stored, or float32 where that is as fast.", str] = (
        "auto"
    )
    draft_dtype: Annotated[Any, "Of the drafter; by default as stored, or float32 on a CPU.", str | None] = None
    device: Annotated[Any, "cpu, cuda:1, auto, or tp, fsdp: split over processes.", str | None] = None
    threads: Annotated[int | None, "CPU threads; by default the idle cores, where steps are faster by them."] = None
    exact: Annotated[bool, "Exact mode: plain decoding's tokens in every number format; slower."] = False
    executor: Annotated[str, f"What runs the decoders: {', '.join(EXECUTORS)}."] = "auto"
    weights: Annotated[str, "Of the target's decoder: stored, or int8, which changes answers."] = STORED
    options: Annotated[Mapping[str, Any], "An option of the method, such as `gamma=7`."] = field(default_factory=dict)
