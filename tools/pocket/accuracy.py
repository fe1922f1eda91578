"""Accuracy of pocket models on held-out samples of every task, and their folders with cards that show it."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig

import saccade
from saccade.files import write_folder
from saccade.pocket.sample import WORLD, Sample, draw, score
from saccade.vlm import VLM
from tools.pocket.batches import BEGIN, END, FIRST_TRAINING_SEED, PAD
from tools.pocket.models import CONTEXT, PocketModel
from tools.pocket.recipe import Recipe
from tools.pocket.tokens import write_processor

_CARD = Path(__file__).with_name("card.md")


def answer(
    vlm: VLM,
    samples: Sequence[Sample],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 32,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """Answers of a model as token ids, without the end token, in the order of the samples."""
    # Rows of a batch end at about the same step if their true answers have the same length.
    order = sorted(range(len(samples)), key=lambda i: (samples[i].task, len(samples[i].answer)))
    answers: list[list[int]] = [[] for _ in samples]
    sampling: dict[str, Any] = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {}
    end = vlm.processor.tokenizer.eos_token_id
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        outputs = vlm.generate(
            [samples[i].messages() for i in chosen],
            seed=[seed + i for i in chosen],
            max_new_tokens=max(WORLD[samples[i].task].longest for i in chosen),
            **sampling,
        )
        for i, output in zip(chosen, outputs, strict=True):
            answers[i] = [token for token in output.tokens if token != end]
        progress(start + len(chosen))
    return answers


_SHUFFLED = 4  # every fourth sample is also shown with another picture
FIRST_SEED = 100_000  # first seed of evaluation; training draws from a million on (`tools.pocket.batches`)


@dataclass(frozen=True)
class Accuracy:
    """Mean score of one kind of fact."""

    task: str
    fact: str
    accuracy: float  # score of the answers
    chance: float  # score of the same answers against another sample's facts
    shuffled: float  # score of answers to the same questions with another sample's media, for a quarter of the samples


def _mean(task: str, fact: str, answers: Sequence[str], samples: Sequence[Sample]) -> float:
    scores = [score(task, text, sample.facts)[fact] for text, sample in zip(answers, samples, strict=True)]
    return sum(scores) / len(scores)


def _others(drawn: Sequence[Sample]) -> list[Sample]:
    """For each sample another one of its task."""
    return [*drawn[1:], drawn[0]]


def measure(
    vlm: VLM,
    tasks: Sequence[str],
    per_task: int,
    grammar: str = "dense",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Accuracy]:
    """Score greedy answers to `per_task` fresh samples of each task."""
    samples = {task: [draw(FIRST_SEED + i, task, grammar) for i in range(per_task)] for task in tasks}
    switched = [
        replace(mine, images=other.images, video=other.video)
        for drawn in samples.values()
        for mine, other in list(zip(drawn, _others(drawn), strict=True))[::_SHUFFLED]
    ]
    prompts = [*(sample for drawn in samples.values() for sample in drawn), *switched]
    ids = answer(vlm, prompts, progress=lambda done: progress(done, len(prompts)))
    texts = iter(vlm.processor.tokenizer.batch_decode(ids))
    answers = {task: [next(texts) for _ in drawn] for task, drawn in samples.items()}
    rows: list[Accuracy] = []
    for task, true in samples.items():
        repeated = true[::_SHUFFLED]
        misled = [next(texts) for _ in repeated]
        for fact in score(task, "", true[0].facts):
            rows.append(
                Accuracy(
                    task,
                    fact,
                    accuracy=_mean(task, fact, answers[task], true),
                    chance=_mean(task, fact, answers[task], _others(true)),
                    shuffled=_mean(task, fact, misled, repeated),
                )
            )
    return rows


def table(rows: Sequence[Accuracy]) -> str:
    """The rows as a Markdown table."""
    lines = ["| task | fact | accuracy | chance | shuffled image |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row.task} | {row.fact} | {row.accuracy:.2f} | {row.chance:.2f} | {row.shuffled:.2f} |")
    return "\n".join(lines)


def write_checkpoint(model: PocketModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write all that `from_pretrained` needs: configuration, weights, tokenizer, processor, template."""
    narrow = copy.deepcopy(model).to(device="cpu", dtype=torch.bfloat16)
    for part in (narrow.config.text_config, narrow.config.vision_config):
        part.dtype = torch.bfloat16  # a model loaded in float32 has that there
    narrow.generation_config = GenerationConfig(do_sample=False, bos_token_id=BEGIN, eos_token_id=END, pad_token_id=PAD)
    narrow.save_pretrained(folder)
    write_processor(tokenizer, folder, CONTEXT)


def export(
    model: PocketModel,
    tokenizer: Tokenizer,
    folder: Path,
    recipe: Recipe,
    *,
    title: str,
    training: str,
    hardware: str,
    drafter: Path | None = None,
) -> None:
    """Write a finished model folder in the place of `folder`, with a card that has its accuracy, measured now.

    `training` is a sentence on it; `drafter` makes measuring faster.
    """

    def progress(done: int, of: int) -> None:
        if done % 320 == 0 or done == of:
            print(f"[export] scored {done} of {of} answers", flush=True)

    def write(part: Path) -> None:
        write_checkpoint(model, tokenizer, part)
        place = "cuda" if torch.cuda.is_available() else None
        vlm = saccade.load(part, drafter, method="chain" if drafter else "plain", device_map=place)
        rows = measure(vlm, recipe.evaluation_tasks or list(WORLD), recipe.evaluation_samples, progress=progress)
        text, vision = model.config.text_config, model.config.vision_config
        card = _CARD.read_text(encoding="utf-8").format(
            title=title,
            tasks=", ".join(WORLD),
            training=training,
            hardware=hardware,
            layers=text.num_hidden_layers,
            width=text.hidden_size,
            tower_layers=vision.num_hidden_layers,
            tower_width=vision.hidden_size,
            parameters=sum(p.numel() for p in model.parameters()) / 1e6,
            first_seed=FIRST_TRAINING_SEED,
            seed=recipe.seed,
            samples=recipe.evaluation_samples,
            table=table(rows),
        )
        (part / "README.md").write_text(card)

    write_folder(folder, write)
