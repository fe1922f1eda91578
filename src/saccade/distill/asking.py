"""Batches of questions to the target, and its answers as lines of the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.distill.options import Options
from saccade.distill.planning import Item, Prompts, asked_messages
from saccade.errors import InputError
from saccade.inputs.conversations import Messages, resolve_media
from saccade.inputs.families import visual_ids
from saccade.output import Output
from saccade.text import decode
from saccade.vlm import VLM


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks the target.

    Attributes:
        vlm: with a lossless method.
        prompts: where the conversations are.
        options: of the run.
        answers: text of the target's answers so far, by id, where later turns hold them.
        refuse: told of a question that cannot be asked; it may raise.
    """

    vlm: VLM
    prompts: Prompts
    options: Options
    answers: Mapping[str, str]
    refuse: Callable[[Item, str], None]

    def ask(self, batch: Sequence[Item], wanted: Sequence[Item]) -> list[tuple[Item, dict[str, Any]]]:
        """Answers to a batch, as lines.

        The whole batch is asked even if only some of it is wanted: in floating point an answer may depend, at ties,
        on how many rows are computed together, and going on after a stop must change nothing.

        Returns:
            Nothing when what is wanted cannot be asked.
        """
        asked: list[tuple[Item, Messages]] = []
        for item in batch:
            try:
                conversation = self.prompts.at(item.offset)
                asked.append((item, asked_messages(item, conversation, self.answers)))
            except InputError as problem:
                self.refuse(item, str(problem))
        while any(item in wanted for item, _ in asked):
            try:
                outputs = self._generate(asked, batch[0].sampled)
            except InputError as problem:
                sound = self._sound(asked)
                if len(sound) == len(asked):
                    raise problem
                asked = sound
            else:
                return [
                    (item, self._line(item, messages, output))
                    for (item, messages), output in zip(asked, outputs, strict=True)
                ]
        return []

    def _generate(self, asked: Sequence[tuple[Item, Messages]], sampled: bool) -> list[Output]:
        outputs: list[Output] = self.vlm.generate(
            [resolve_media(messages, self.prompts.root) for _, messages in asked],
            seed=[self.options.seed_of(item.id) for item, _ in asked],
            **self.options.decoding(sampled),
        )
        return outputs

    def _sound(self, asked: Sequence[tuple[Item, Messages]]) -> list[tuple[Item, Messages]]:
        """Those that the target takes, each tried alone."""
        sound = []
        for item, messages in asked:
            try:
                prompt = self.vlm.processor.prompt(resolve_media(messages, self.prompts.root))
                self.vlm.target.check_length(len(prompt) + self.options.max_new_tokens)
            except InputError as problem:
                self.refuse(item, str(problem).rstrip("."))
            else:
                sound.append((item, messages))
        return sound

    def _line(self, item: Item, messages: Messages, output: Output) -> dict[str, Any]:
        ids, finish = list(output.tokens), str(output.finish_reason)
        ending: dict[str, int] = {}
        if finish == "eos":
            *ids, ending["eos_id"] = ids
        pictures = set(visual_ids(self.vlm.target.config).values())
        cut = next((i for i, token in enumerate(ids) if token in pictures), None)
        if cut is not None:  # a reader would look for an image there
            ids, finish, ending = ids[:cut], "visual", {}
        return {
            "id": item.id,
            "messages": messages,
            "answer": decode(self.vlm.processor.tokenizer, ids),
            "answer_ids": ids,
            "finish": finish,
            **ending,
            "temperature": float(self.options.temperature) if item.sampled else 0.0,
        }
