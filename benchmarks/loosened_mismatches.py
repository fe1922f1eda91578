"""Which mismatches loose rules forgive on the pocket pair, and whether their signals tell the harmful ones.

A rule like LVSpec's or FLy's only matters where the draft token is not the target's own. Here both models read the
target's own answers once: at every token the draft model guesses the next one, the target's relevance (LVSpec, Eq. 7)
and entropy (FLy) are taken, and a mismatch counts as harmful if the guess or the target's token is a word that no
answer can get right without looking (`saccade.pocket.words.CONTENT`). An area is that under the ROC curve, how often a
signal ranks a harmful mismatch above a harmless one: relevance as it is, entropy with its sign turned.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

import saccade
from benchmarks.pocket_pair import FIRST_SEED
from saccade.draft.lookup import chains
from saccade.inputs.prompt import Prompt
from saccade.pocket import draw
from saccade.pocket.words import CONTENT
from saccade.target.context import Context
from saccade.verify.loose import LVSpec

TASKS = ("scene", "chart", "receipt", "video", "prose", "long-video")


@dataclass(frozen=True, slots=True)
class Place:
    """One draft token behind the target's own answer."""

    differs: bool  # whether it is not the target's own token
    content: bool  # whether it or the target's own token is a content word
    relevance: float  # similarity of the verifying state with those of visual tokens, -1 to 1
    entropy: float  # of the target's distribution, as a share of the largest possible


@torch.inference_mode()
def places(vlm: saccade.VLM, prompt: Prompt, answer: Sequence[int]) -> Iterator[Place]:
    """Every token of an answer but the first, as guessed by the draft model behind those before it."""
    root, *rest = answer
    rule = LVSpec()
    context = Context(vlm.target, 1)
    context.cache.reserve(0, len(prompt) + len(answer))
    judge = rule.open(context)
    judge.read(0, prompt, context.load(0, prompt))
    tree = chains([root], [rest], vlm.target.device)
    output = context.forward([0], tree.tokens, tree.ancestors, tree.depth)
    relevance = judge.relevance([0], tree, output)[0, 1:].tolist()
    log_p = output.logits[0, :-1].float().log_softmax(-1)
    entropy = (-(log_p.exp() * log_p).sum(-1) / torch.tensor(float(log_p.shape[-1])).log()).tolist()
    draft = Context(vlm.draft_model, 1)
    draft.cache.reserve(0, len(prompt) + len(answer))
    draft.load(0, prompt)
    guesses = draft.forward([0], tree.tokens, tree.ancestors, tree.depth).logits[0, :-1].argmax(-1).tolist()
    decode = vlm.processor.tokenizer.decode
    for own, guess, seen, unsure in zip(rest, guesses, relevance, entropy, strict=True):
        words = (decode([token]).strip().lower() for token in (own, guess))
        yield Place(own != guess, any(word in CONTENT for word in words), seen, unsure)


def area(above: Sequence[float], below: Sequence[float]) -> float:
    """Area under the ROC curve; not a number if either is empty."""
    if not above or not below:
        return float("nan")
    pairs = torch.tensor(above)[:, None] - torch.tensor(below)[None]
    return float((pairs > 0).float().mean() + 0.5 * (pairs == 0).float().mean())


def row(found: Sequence[Place]) -> str:
    """One line of the table."""
    differing = [place for place in found if place.differs]
    harmful, harmless = ([p for p in differing if p.content is content] for content in (True, False))
    everywhere = area([p.relevance for p in found if p.content], [p.relevance for p in found if not p.content])
    relevance = area([p.relevance for p in harmful], [p.relevance for p in harmless])
    entropy = area([-p.entropy for p in harmful], [-p.entropy for p in harmless])
    content = sum(p.content for p in found) / len(found)
    numbers = (content, len(differing) / len(found), len(harmful) / max(len(differing), 1), everywhere)
    return " | ".join([str(len(found)), *(f"{n:.2f}" for n in (*numbers, relevance, entropy))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=TASKS, help=f"default: {' '.join(TASKS)}")
    parser.add_argument("--prompts", type=int, default=24, help="per task (default: 24; of long videos a third)")
    parser.add_argument("--new-tokens", type=int, default=128, help="per answer (default: 128)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    options = parser.parse_args()
    vlm = saccade.load("pocket", method="chain", dtype="float32", threads=options.threads)
    print("| task | tokens | content | mismatches | of them harmful | area: relevance, all | relevance | entropy |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for task in options.tasks:
        found: list[Place] = []
        for number in range(options.prompts // 3 if task == "long-video" else options.prompts):
            prompt = vlm.processor.prompt(draw(FIRST_SEED + number, task, "dense").messages())
            found += places(vlm, prompt, vlm.generate(prompt, max_new_tokens=options.new_tokens).tokens)
        print(f"| {task} | {row(found)} |", flush=True)


if __name__ == "__main__":
    main()
