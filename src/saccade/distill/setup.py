"""Arguments of a distillation run, checked, and the header that says what makes the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from saccade.distill import pocket_source
from saccade.distill.folder import Folder
from saccade.distill.generating import Generator
from saccade.distill.options import Options
from saccade.distill.planning import Item, Prompts, refuse
from saccade.environment import model_facts
from saccade.errors import InputError, MethodError
from saccade.target.adapter import Target
from saccade.vlm import VLM

_POCKET_ONLY = ("count", "first_seed", "grammar")


def models_of(vlm: VLM) -> dict[str, Any]:
    """Facts about a run's models, which decide its answers."""
    if not vlm.lossless:
        raise MethodError(f"Method {vlm.method} is lossy, so its answers are not the target's; choose a lossless one.")
    drafts = vlm.draft_model if vlm.method != "plain" else None
    return {
        "method": vlm.method,
        "target": _facts(vlm.target),
        "processor": {"digest": vlm.processor.digest},
        "drafter": None if drafts is None else _facts(drafts),
    }


def header(
    models: Mapping[str, Any],
    prompts: str,
    source: Mapping[str, Any],
    options: Options,
    method_options: Mapping[str, Any],
) -> dict[str, Any]:
    """Content of ``distill.json``."""
    chosen = asdict(options)
    if "pocket" not in source:
        chosen = {name: value for name, value in chosen.items() if name not in _POCKET_ONLY}
    return {
        "prompts": prompts,
        "source": dict(source),
        **{group: models[group] for group in ("target", "processor", "drafter")},
        "options": {**chosen, "method": models["method"], "method_options": dict(method_options)},
        "versions": {name: metadata.version(name) for name in ("saccade", "torch", "transformers")},
    }


def _facts(target: Target) -> dict[str, Any]:
    model = target.model
    facts = model_facts(model, str(model.config._name_or_path))
    return facts | ({"exact": True} if target.exact else {})


def check_options(on_bad_line: str, options: Mapping[str, Any]) -> Options:
    """Return the options of a run."""
    if on_bad_line not in ("stop", "skip"):
        raise InputError(f"on_bad_line must be stop or skip, not {on_bad_line!r}.")
    unknown = sorted(set(options) - set(Options.__slots__))
    if unknown:
        raise InputError(f"Unknown option {unknown[0]}; expected {', '.join(Options.__slots__)}.")
    return Options(**options)


class Setup:
    """The arguments of `saccade.distill.distill`, with `models_of` in place of the models."""

    def __init__(
        self,
        models: Mapping[str, Any],
        source: str | Path,
        out: Path,
        media_root: str | Path | None,
        on_bad_line: str,
        method_options: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self.out, self.on_bad_line = out, on_bad_line
        self.options = check_options(on_bad_line, options)
        self.tasks: list[str] = []
        self._prompts: Prompts | None = None
        name = str(source)
        if name.startswith(pocket_source.PREFIX):
            if media_root is not None:
                raise InputError("A pocket source draws its own media; leave out media_root.")
            self.tasks = pocket_source.tasks_of(name, self.options.grammar)
            identity: dict[str, Any] = {"pocket": self.tasks, "media_root": "."}
        else:
            for word in ("count", "first_seed", "grammar"):
                if word in options and options[word] != getattr(Options(), word):
                    raise InputError(f"{word} is for pocket sources; leave it out, or use limit for a file.")
            path = Path(source).expanduser()
            root = (path.parent if media_root is None else Path(media_root).expanduser()).resolve()
            self._prompts = Prompts(path, root)
            identity = {"content": self._prompts.digest, "media_root": str(root)}
            name = path.name
        self._header = header(models, name, identity, self.options, method_options)

    def folder(self) -> Folder:
        """The output folder, not opened yet."""
        return Folder(self.out, self._header)

    def prompts(self, folder: Path) -> Prompts:
        """Return the prompt set: the file, or the samples drawn into a folder."""
        return self._prompts or Prompts(folder / pocket_source.FILE, folder)

    @contextmanager
    def drawn(self) -> Iterator[Path]:
        """Open a temporary folder with the pocket samples, or the output folder where they are drawn already."""
        if not self.tasks or (self.out / pocket_source.FILE).is_file():
            yield self.out
            return
        with TemporaryDirectory() as name:
            pocket_source.write_prompts(Path(name), self.tasks, self.options)
            yield Path(name)

    def generator(self, vlm: VLM, prompts: Prompts, answers: Mapping[str, str], problems: list[str]) -> Generator:
        """Return the generator of answers; unusable questions are recorded in ``problems``, or end the run."""

        def bad(item: Item, reason: str) -> None:
            refuse(problems, f"{prompts.where(item.line)}, question {item.id}: {reason}.", self.on_bad_line)

        return Generator(vlm, prompts, self.options, answers, bad)
