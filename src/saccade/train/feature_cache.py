"""Features cached for later epochs, in memory or in checksummed files, up to a limit."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from saccade.errors import TrainingError
from saccade.files import make_folder, write_file
from saccade.target_model.adapter import Target
from saccade.train.features import Features, Needed

_SHARD = 64  # samples per file

_FORMAT = 3  # version of the files; others are discarded
_FOLDER = re.compile(r"[0-9a-f]{16}")  # names of the folders of fingerprints


class FeatureCache:
    """Features by sample number.

    Only target outputs that the head reads are cached: text embeddings are looked up again, and states that are never
    read become zeros. Files are named by the hash of their content; a damaged one is reported and removed, and its
    samples are computed again. Several processes may share a folder: each writes files of its own, and finds those of
    the others when it lacks a sample.
    """

    def __init__(
        self,
        target: Target,
        limit: float,
        folder: Path | None = None,
        fingerprint: str = "",
        say: Callable[[str], None] = print,
        needed: Callable[[Features], Needed] | None = None,
        shared: bool = False,
    ) -> None:
        self._needed = needed or (
            lambda sample: Needed(dict.fromkeys(sample.states, torch.ones_like(sample.visual)), sample.visual)
        )
        self._target, self._limit, self._folder, self._say = target, limit, folder, say
        self.bytes = 0  # cached now
        self._memory: dict[int, dict[str, Tensor]] = {}
        self._shards: dict[int, Path] = {}
        self._known: set[Path] = set()
        self._whole: set[Path] = set()
        self._changed = -1
        if folder is not None:
            self._folder = folder / hashlib.sha256(f"{_FORMAT} {fingerprint}".encode()).hexdigest()[:16]
            make_folder(self._folder, TrainingError, f"give another {'--features' if shared else '--out'} folder")
            for other in () if shared else folder.iterdir():  # other processes may do so at once
                if other != self._folder and other.is_dir() and _FOLDER.fullmatch(other.name):
                    shutil.rmtree(other, ignore_errors=True)
            self._scan()

    @property
    def samples(self) -> int:
        return len(self._shards.keys() | self._memory.keys())

    def get(self, index: int) -> Features | None:
        """The features of a sample on the target's device, or None."""
        packed = self._memory.get(index)
        if packed is None and index not in self._shards:
            self._scan()
        if packed is None and index in self._shards:
            packed = self._read(index)
        return None if packed is None else self._unpack(packed)

    def put(self, index: int, features: Features) -> None:
        """Cache the features of a sample if there is room."""
        if index in self._memory or index in self._shards:
            return
        packed = self._pack(features)
        size = _size(packed)
        if self.bytes + size > self._limit:
            return
        self._memory[index] = packed
        self.bytes += size
        if self._folder is not None and len(self._memory) >= _SHARD:
            self.flush()

    def bytes_of(self, features: Features) -> int:
        return _size(self._pack(features))

    def flush(self) -> None:
        """Write samples that wait for a full file; no effect in memory."""
        if self._folder is None or not self._memory:
            return
        tensors = {}
        for index, packed in self._memory.items():
            tensors.update({f"{index}.{name}": tensor for name, tensor in packed.items()})
        content = save(tensors)
        place = self._folder / f"{hashlib.sha256(content).hexdigest()}.safetensors"
        self._known.add(place)
        write_file(place, content, error=TrainingError)
        self._shards.update(dict.fromkeys(self._memory, place))
        self._memory.clear()

    def __str__(self) -> str:
        each = self.bytes // self.samples if self.samples else 0
        return f"{self.samples} samples, {self.bytes / 1e6:.1f} MB ({each} bytes each)"

    def _scan(self) -> None:
        """Find files that other processes have written since the last scan."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)  # another process may have removed it when it was done
        changed = self._folder.stat().st_mtime_ns
        if changed == self._changed:
            return
        self._changed = changed
        for place in sorted(set(self._folder.glob("*.safetensors")) - self._known):
            self._known.add(place)
            try:
                with safe_open(place, "pt") as file:
                    names = file.keys()
                    held = {int(name.partition(".")[0]) for name in names}
                size = place.stat().st_size
            except (SafetensorError, ValueError, OSError):
                self._drop(place)
                continue
            self._shards.update(dict.fromkeys(held - self._shards.keys(), place))
            self.bytes += size

    def _read(self, index: int) -> dict[str, Tensor] | None:
        place = self._shards[index]
        try:
            if place not in self._whole:
                content = place.read_bytes()
                if hashlib.sha256(content).hexdigest() != place.stem:
                    self._drop(place)
                    return None
                load(content)
                self._whole.add(place)
            with safe_open(place, "pt") as file:
                prefix, names = f"{index}.", file.keys()
                return {n.removeprefix(prefix): file.get_tensor(n) for n in names if n.startswith(prefix)}
        except (OSError, SafetensorError):
            self._drop(place)
            return None

    def _drop(self, place: Path) -> None:
        lost = [i for i, shard in self._shards.items() if shard == place]
        for index in lost:
            del self._shards[index]
        with suppress(FileNotFoundError):  # another process was faster
            self.bytes = max(self.bytes - place.stat().st_size, 0)
            place.unlink()
        self._say(f"The feature file {place} is damaged or gone; its samples are computed again.")

    def _pack(self, features: Features) -> dict[str, Tensor]:
        needed = self._needed(features)
        packed = {f"state.{i}": states[needed.states[i]] for i, states in features.states.items()}
        packed["ids"], packed["answer"] = features.ids, features.answer
        packed["visual"] = features.embeddings[needed.visual]
        packed["stops"] = torch.tensor(features.stops, dtype=torch.long)
        if features.dropped is not None:
            packed["dropped"] = features.dropped
        return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in packed.items()}

    def _unpack(self, packed: dict[str, Tensor]) -> Features:
        held = {name: t.to(self._target.device) for name, t in packed.items()}
        visual = self._target.family.visual_mask(held["ids"])
        given = {}
        for name in (name for name in held if name.startswith("state.")):
            given[int(name.removeprefix("state."))] = held[name]
        stops = tuple(packed["stops"].tolist())
        with torch.no_grad():
            text = held["ids"].masked_fill(visual, 0)  # placeholders may lie outside the embedding table
            embeddings = self._target.model.get_input_embeddings()(text)
            embeddings[visual] = 0
            features = Features(held["ids"], visual, held["answer"], given, embeddings, held.get("dropped"), stops)
            needed = self._needed(features)
            embeddings[needed.visual] = held["visual"]
        states = {}
        for layer, kept in given.items():
            states[layer] = kept.new_zeros(len(visual), kept.shape[1])
            states[layer][needed.states[layer]] = kept
        return replace(features, states=states)


def _size(packed: dict[str, Tensor]) -> int:
    return sum(t.nbytes for t in packed.values())
