"""Generation of the target's answers, batch by batch, as lines of the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saccade.distill.options import Options
from saccade.distill.planning import Item, Prompts, messages_of
from saccade.errors import InputError
from saccade.inputs.conversations import Messages, resolve_media
from saccade.inputs.families import visual_ids
from saccade.output import Output
from saccade.text import decode
from saccade.vlm import VLM


@dataclass(frozen=True, slots=True)
class Generator:
    """Generates answers by the target."""

    vlm: VLM  # with a lossless method
    prompts: Prompts  # the prompt set
    options: Options  # of the run
    answers: Mapping[str, str]  # text of the target's earlier answers by id
    refuse: Callable[[Item, str], None]  # called with a question that cannot be used and the reason; it may raise

    def answer(self, batch: Sequence[Item], wanted: Sequence[Item]) -> list[tuple[Item, dict[str, Any]]]:
        """Answer a batch of questions.

        The whole batch is generated even if only some of it is wanted: in floating point an answer may depend, at ties,
        on the number of rows that are computed together, and a resumed run must repeat the answers of an unbroken one.
        """
        rows: list[tuple[Item, Messages]] = []
        for item in batch:
            try:
                conversation = self.prompts.at(item.offset)
                rows.append((item, messages_of(item, conversation, self.answers)))
            except InputError as problem:
                self.refuse(item, str(problem))
        while any(item in wanted for item, _ in rows):
            try:
                outputs = self._generate(rows, batch[0].sampled)
            except InputError as problem:
                usable = self._usable(rows)
                if len(usable) == len(rows):
                    raise problem
                rows = usable
            else:
                return [
                    (item, self._line(item, messages, output))
                    for (item, messages), output in zip(rows, outputs, strict=True)
                ]
        return []

    def _generate(self, rows: Sequence[tuple[Item, Messages]], sampled: bool) -> list[Output]:
        outputs: list[Output] = self.vlm.generate(
            [resolve_media(messages, self.prompts.root) for _, messages in rows],
            seed=[self.options.seed_of(item.id) for item, _ in rows],
            **self.options.decoding(sampled),
        )
        return outputs

    def _usable(self, rows: Sequence[tuple[Item, Messages]]) -> list[tuple[Item, Messages]]:
        """Questions that fit the target, each checked alone."""
        usable = []
        for item, messages in rows:
            try:
                prompt = self.vlm.processor.prompt(resolve_media(messages, self.prompts.root))
                self.vlm.target.check_length(len(prompt) + self.options.max_new_tokens)
            except InputError as problem:
                self.refuse(item, str(problem).rstrip("."))
            else:
                usable.append((item, messages))
        return usable

    def _line(self, item: Item, messages: Messages, output: Output) -> dict[str, Any]:
        ids, finish = list(output.tokens), str(output.finish_reason)
        ending: dict[str, int] = {}
        if finish == "eos":
            *ids, ending["eos_id"] = ids
        placeholders = set(visual_ids(self.vlm.target.config).values())
        cut = next((i for i, token in enumerate(ids) if token in placeholders), None)
        if cut is not None:  # a placeholder without its image
            ids, finish, ending = ids[:cut], "visual", {}
        return {
            "id": item.id,
            "messages": messages,
            "answer": decode(self.vlm.processor.tokenizer, ids),
            "answer_ids": ids,
            "finish": finish,
            **ending,
            "temperature": float(self.options.temperature) if item.sampled else 0.0,
            "prompt_tokens": output.stats.prompt_tokens,
        }
