"""A draft that knows forms: `python -m tools.pocket.forms --out DIR` trains the built-in one on the target's answers.

The answers are those under the schemas of `tools.pocket.world.forms`, since the pair never wrote JSON. At the end it
prints how many tokens a pass chains of five give with either draft, on fresh forms.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import saccade
from saccade.files import write_folder
from saccade.pocket import draft_path, target_path
from tools.pocket.accuracy import FIRST_SEED, write_checkpoint
from tools.pocket.batches import END, FIRST_TRAINING_SEED, IGNORED, Batch, batch_of, neighbours
from tools.pocket.loop import save, train
from tools.pocket.models import PocketModel, decode, embed, prepare, training_loss
from tools.pocket.recipe import Schedule
from tools.pocket.world import forms

_LONGEST = 400
_CHAIN = 5
_CHUNK = 15  # answers between two saves

Answered = tuple[int, str, list[int]]  # seed and task of a form, and the answer as token ids


@dataclass(frozen=True)
class FormBatches:
    """Batches by number: forms with answers of similar length, which are sorted by it."""

    schedule: Schedule
    tokenizer: Tokenizer
    answered: Sequence[Answered]

    def __call__(self, number: int) -> Batch:
        rows = neighbours(Random(f"forms/{number}"), self.answered, self.schedule.batch)
        samples = [forms.draw(seed, task).sample for seed, task, _ in rows]
        return batch_of(self.tokenizer, samples, [ids for *_, ids in rows])


def answers(path: Path, count: int, first: int = FIRST_TRAINING_SEED) -> list[Answered]:
    """Greedy answers of the target to `count` forms of all tasks in turn, under their schemas; resumes from `path`."""
    rows: list[Answered] = torch.load(path) if path.exists() else []
    vlm = saccade.load(target_path(), draft_path(), method="chain", dtype="float32")
    while len(rows) < count:
        number = len(rows)
        seed, task = first + number, forms.TASKS[number % len(forms.TASKS)]
        form = forms.draw(seed, task)
        schema = saccade.grammar.json_schema(form.schema, vlm.processor.tokenizer, vlm.target.vocab_size)
        output = vlm.generate(form.sample.messages(), max_new_tokens=_LONGEST, logits_processor=[schema])
        rows.append((seed, task, [token for token in output.tokens if token != END]))
        if len(rows) % _CHUNK == 0 or len(rows) == count:
            save(rows, path)
            print(f"[answers] {len(rows)} of {count}", flush=True)
    return rows[:count]


@torch.inference_mode()
def guessed(draft: PocketModel, tokenizer: Any, row: Answered) -> list[tuple[bool, bool, bool]]:
    """Of every token of an answer: whether the draft's guess is right, the one under the schema, and no other fits."""
    seed, task, ids = row
    form = forms.draw(seed, task)
    batch = batch_of(tokenizer.backend_tokenizer, [form.sample], [ids])
    schema = saccade.grammar.json_schema(form.schema, tokenizer, draft.config.text_config.vocab_size)
    logits = draft.lm_head(decode(draft, embed(draft, batch), batch))[0, :-1][batch.targets[0, 1:] != IGNORED]
    place, found = schema.start(()), []
    for scores, token in zip(logits, [*ids, END], strict=True):
        under = schema.scores(place, scores.clone())
        found.append((int(scores.argmax()) == token, int(under.argmax()) == token, place.count == 1))
        if token != END:
            place = schema.advance(place, token)
    return found


def passes(right: Sequence[bool], forced: Sequence[bool]) -> int:
    """Passes after the first token that chains of `_CHAIN` guesses need, where forced tokens take no guess."""
    count, at = 0, 1
    while at < len(right):
        guesses = 0
        while at < len(right) and (forced[at] or (right[at] and guesses < _CHAIN)):
            guesses += not forced[at]
            at += 1
        count, at = count + 1, at + 1
    return count


def table(drafts: Mapping[str, PocketModel], tokenizer: Any, rows: Mapping[str, Sequence[Answered]]) -> str:
    """Tokens per pass of every draft on each kind of answers, by task, as a Markdown table."""
    lines = ["| answers | task | draft | chain | forced runs | both |", "|---|---|---|---|---|---|"]
    for kind, answered in rows.items():
        for task in forms.TASKS:
            for name, draft in drafts.items():
                tokens, needed = 0, [0, 0, 0]
                for row in (row for row in answered if row[1] == task):
                    right, under, forced = zip(*guessed(draft, tokenizer, row), strict=True)
                    never = [False] * len(right)
                    ways = ((right, never), (never, forced), (under, forced))
                    tokens += len(right) - 1
                    needed = [before + passes(*way) for before, way in zip(needed, ways, strict=True)]
                lines.append(f"| {kind} | {task} | {name} | " + " | ".join(f"{tokens / n:.2f}" for n in needed) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--answers", type=int, default=300)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--fresh", type=int, default=48, help="forms of the table")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    answered = sorted(answers(options.out / "answers.pt", options.answers), key=lambda row: len(row[-1]))
    draft = prepare(PocketModel.from_pretrained(draft_path(), dtype=torch.float32))
    tokenizer = Tokenizer.from_file(str(target_path() / "tokenizer.json"))
    schedule = Schedule(steps=options.steps, batch=16, rate=2e-3, warmup=20)
    make, loss = FormBatches(schedule, tokenizer, answered), partial(training_loss, draft)
    train("forms", draft, make, loss, schedule, options.out, 60.0)
    write_folder(options.out / "draft", partial(write_checkpoint, draft, tokenizer))
    own = answers(options.out / "fresh.pt", options.fresh, FIRST_SEED)
    true = [(seed, task, tokenizer.encode(forms.draw(seed, task).sample.answer).ids) for seed, task, _ in own]
    drafts = {"built-in": PocketModel.from_pretrained(draft_path(), dtype=torch.float32), "trained": draft}
    wrapped = AutoTokenizer.from_pretrained(target_path())
    print(table(drafts, wrapped, {"the target's": own, "true": true}))


if __name__ == "__main__":
    main()
