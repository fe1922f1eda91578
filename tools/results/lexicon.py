"""The relevance `lexicon` of LVSpec: an oracle that knows the words of the pocket world that answers are scored by.

It says how much a better relevance could win on the built-in pair, and is no method: no other model has such a list.
"""

from functools import lru_cache

import torch
from torch import Tensor

from saccade.loading import load_processor
from saccade.options import RELEVANCES
from saccade.pocket import target_path
from saccade.pocket.film import WHATS
from saccade.pocket.words import COLOURS, COLUMNS, DAYS, GOODS, NAMES, NUMBERS, ORDINALS, ROWS, SHAPES, SIZES, TOWNS
from saccade.tree import DraftTree

SCORED = {
    word.lower()
    for words in (COLOURS, SHAPES, SIZES, ROWS, COLUMNS, NUMBERS, ORDINALS, GOODS, DAYS, NAMES, TOWNS, WHATS)
    for word in words
}
"""Words that name what is seen."""


@lru_cache(maxsize=1)
def is_scored() -> Tensor:
    """``[V]`` whether a token of the pocket models is such a word."""
    processor = load_processor(str(target_path()))
    return torch.tensor(
        [processor.decode([token]).strip().lower() in SCORED for token in range(len(processor.tokenizer))]
    )


def relevance(tree: DraftTree) -> Tensor:
    """One for draft tokens that name what is seen, and zero for all others."""
    found: Tensor = is_scored().to(tree.tokens.device)[tree.tokens].float()
    return found


RELEVANCES["lexicon"] = relevance
