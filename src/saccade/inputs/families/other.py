"""Language models, and vision-language models outside the registry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from saccade.errors import InputError
from saccade.inputs.families.family import Family, Grid, Kind, MediumTensors, Tensors
from saccade.inputs.prompt import Medium, Prompt, digest


class Text(Family):
    """A language model."""

    names = MappingProxyType(
        {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "ministral3": "Ministral 3"}
    )
    decoders = tuple(names)
    is_tested = True
    reads_images = False

    @property
    def visual_ids(self) -> dict[Kind, int]:
        return {}

    def count(self, kind: Kind, tensors: Tensors) -> int:
        raise InputError(f"The model {self.name} reads text only; leave the {kind} out.")

    def cut(self, tensors: Tensors, rows: Sequence[Sequence[int]]) -> Iterator[MediumTensors]:
        if tensors:
            raise InputError(
                f"The model {self.name} reads text only, but the batch holds {', '.join(tensors)}; leave images out."
            )
        return iter(())

    def words(self, tokenizer: Any) -> None:
        return None

    def grid(self, medium: Medium) -> Grid | None:
        return None


class OtherText(Text):
    """A configuration without vision tower that is not in the registry."""

    names = MappingProxyType({})
    decoders = ()
    is_tested = False
    is_known = False


class Unknown(Family):
    """A vision-language model outside the registry, through its own processor.

    All images and videos of a row form one medium, because it is unknown where one ends.
    """

    is_known = False
    is_composite = True

    def count(self, kind: Kind, tensors: Tensors) -> int:
        return 0

    def cut(self, tensors: Tensors, rows: Sequence[Sequence[int]]) -> Iterator[MediumTensors]:
        if tensors:
            if len(rows) > 1:
                raise InputError(
                    f"Batches with images are not understood for the family {self.name}; pass its rows one by one."
                )
            yield MediumTensors("image", dict(tensors))

    def split(self, rows: Sequence[Sequence[int]], tensors: Tensors) -> list[Prompt]:
        pieces = list(self.cut(tensors, rows))
        media = tuple(self.whole_medium(rows[0], piece.tensors) for piece in pieces)
        return [Prompt(tuple(ids), media) for ids in rows]

    def whole_medium(self, ids: Sequence[int], tensors: Tensors) -> Medium:
        """All images and videos of one row, of 0 tokens unless it has placeholders of one kind alone."""
        counts = {kind: list(ids).count(token) for kind, token in self.visual_ids.items() if token in ids}
        kind, number = next(iter(counts.items())) if len(counts) == 1 else ("image", 0)
        return Medium(kind, dict(tensors), number, digest(tensors))

    def words(self, tokenizer: Any) -> None:
        return None

    def grid(self, medium: Medium) -> Grid | None:
        return None

    def collate(self, rows: Sequence[Sequence[Medium]]) -> dict[str, Tensor]:
        if len(rows) > 1:
            raise InputError(f"Batches are not understood for the family {self.name}; pass its rows one by one.")
        return super().collate(rows)


class Florence2(Unknown):
    """Florence-2, a captioner that needs its task as text."""

    names = MappingProxyType({"florence2": "Florence-2"})
    caption_prompt = "<CAPTION>"
