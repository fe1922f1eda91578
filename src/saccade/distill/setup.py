"""The arguments of a run, checked and made into its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from saccade.distill import pocket_source
from saccade.distill.asking import Asker
from saccade.distill.folder import Folder
from saccade.distill.header import header
from saccade.distill.options import Options
from saccade.distill.planning import Item, Prompts, refuse
from saccade.errors import InputError, MethodError
from saccade.vlm import VLM


class Setup:
    """The arguments of `saccade.distill.distill`.

    Raises:
        SaccadeError: one of them cannot be used.
    """

    def __init__(
        self,
        vlm: VLM,
        source: str | Path,
        out: Path,
        media_root: str | Path | None,
        on_bad_line: str,
        method_options: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        if not vlm.lossless:
            raise MethodError(
                f"Method {vlm.method} is lossy, so its answers are not the target's; choose a lossless one."
            )
        if on_bad_line not in ("stop", "skip"):
            raise InputError(f"on_bad_line must be stop or skip, not {on_bad_line!r}.")
        unknown = sorted(set(options) - set(Options.__slots__))
        if unknown:
            raise InputError(f"Unknown option {unknown[0]}; expected {', '.join(Options.__slots__)}.")
        self.vlm, self.out, self.on_bad_line = vlm, out, on_bad_line
        self.options = Options(**options)
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
        self._header = header(vlm, name, identity, self.options, method_options)

    def folder(self) -> Folder:
        """The output folder, not opened yet."""
        return Folder(self.out, self._header)

    def prompts(self, folder: Path) -> Prompts:
        """The prompt set: a file, or what was drawn into a folder."""
        return self._prompts or Prompts(folder / pocket_source.FILE, folder)

    @contextmanager
    def drawn(self) -> Iterator[Path]:
        """A folder with the pocket samples that goes away again, unless an attempt has drawn them already."""
        if not self.tasks or (self.out / pocket_source.FILE).is_file():
            yield self.out
            return
        with TemporaryDirectory() as name:
            pocket_source.write_prompts(Path(name), self.tasks, self.options)
            yield Path(name)

    def asker(self, prompts: Prompts, answers: Mapping[str, str], problems: list[str]) -> Asker:
        """Asks the target; questions that cannot be asked are noted in ``problems``, or end the run."""

        def bad(item: Item, reason: str) -> None:
            refuse(problems, f"{prompts.where(item.line)}, question {item.id}: {reason}.", self.on_bad_line)

        return Asker(self.vlm, prompts, self.options, answers, bad)
