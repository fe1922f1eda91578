"""A pair's forwards over the target's own answers, and what they say of drafting without running it.

Every view of the draft model reads the target's greedy answer, token by token. A greedy chain goes on where its
likeliest token is the target's, so the steps of speculative decoding follow from the places where it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from saccade.bench.metrics import Array
from saccade.draft.ensemble.ensemble import EnsembleDrafter, View
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain
from saccade.draft.trees.sage import SageTree
from saccade.errors import MethodError, ModelError
from saccade.inputs.families import family_of
from saccade.inputs.families.family import Prompt
from saccade.options import LVSpecOptions
from saccade.pocket.labels import LABEL_WORDS
from saccade.pocket.words import NUMBERS
from saccade.target_model.context import Context
from saccade.target_model.stock import AttentionProbe
from saccade.target_model.token_blocks import ForwardOutput
from saccade.vlm import VLM

GAMMA = 5  # length of the chains (TABED, Section 5)
LOOSE = LVSpecOptions().loose_share
PROXY, LEXICON = "proxy", "lexicon"
"""Two truths about what depends on the pictures: the target chooses another token without them; and, for the prompts of
the pocket world, a word names what they show."""
Names = Callable[[list[int]], Array]  # whether each token of a text names what is seen


@dataclass(slots=True)
class Answer:
    """One answer; arrays have an entry for every token but the first."""

    relevance: Array  # A of LVSpec
    depends: dict[str, Array]  # truth -> whether the token depends on what is seen
    touches: dict[str, Array]  # the same for the token or the first view's in its place
    hits: dict[str, Array] = field(default_factory=dict)  # view -> whether its likeliest token is the target's
    confidence: Array | None = None  # alpha of SAGE, of the first view

    @property
    def drafted(self) -> Array:
        """Hits of the first view."""
        return next(iter(self.hits.values()))

    @property
    def forgiven(self) -> Array:
        """Its mismatches among the tokens that LVSpec verifies loosely."""
        least: Array = self.relevance <= np.quantile(self.relevance, LOOSE)
        return ~self.drafted & least


def lexicon(decode: Callable[[list[int]], str]) -> Names:
    """Names of what the pocket world's pictures show, and digits."""
    words = {word.lower() for words in (*LABEL_WORDS.values(), NUMBERS) for word in words}

    def names(tokens: list[int]) -> Array:
        pieces = [decode([token]) for token in tokens]
        owner = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])  # by character
        found = np.zeros(len(tokens), bool)
        for match in re.finditer(r"[a-z]+|[0-9]+", "".join(pieces).lower()):
            if match[0].isdigit() or {match[0], match[0].removesuffix("s")} & words:
                found[owner[match.start() : match.end()]] = True
        return found

    return names


def steps(hits: Array, gamma: int = GAMMA) -> tuple[list[int], list[int]]:
    """Roots of a greedy chain's steps in an answer, and the draft tokens accepted in each."""
    roots, accepted, root = list[int](), list[int](), 0
    while root < len(hits):
        ahead = hits[root : root + gamma]
        roots.append(root)
        accepted.append(len(ahead) if ahead.all() else int(ahead.argmin()))
        root += accepted[-1] + 1
    return roots, accepted


class Probe:
    """Forwards of target and drafter over the target's own answers."""

    def __init__(self, vlm: VLM) -> None:
        self.vlm, self.target, self.last = vlm, vlm.target, len(vlm.target.layers)
        self.sizes: dict[str, list[Array]] = {}  # root mean square of every vector, by what it is of
        self.attention: dict[str, list[Array]] = {}  # by whose: share that visual tokens get in each layer
        self.unread = ""  # why attention is not measured, if it is not
        try:
            with AttentionProbe(self.target):
                pass
        except ModelError as problem:
            self.unread = str(problem)
        self.context, self.blind = Context(self.target, 1), Context(self.target, 1)
        self.context.requirements.add_layers(0, self.last)
        self.views = dict[str, EnsembleDrafter]()
        self.lacking: dict[str, str] = {}  # view -> why it is left out
        draft = vlm.draft_model if vlm.drafts_from_prompts else None
        for letter in "" if draft is None else "MTCP" if family_of(draft.config).visual_ids else "T":
            try:
                drafter = vlm.using("tabed", views=letter).engine.drafter
                assert isinstance(drafter, EnsembleDrafter)
                self.views[letter] = drafter
            except MethodError as problem:
                self.lacking[letter] = str(problem)
        for drafter in list(self.views.values())[:1]:
            self.session = ModelDrafter(drafter.model, Chain(1), drafter.vocab_size).open(1, self.context)

    @torch.inference_mode()
    def read(self, prompt: Prompt, tokens: list[int], names: Names | None = None) -> Answer:
        """Measure one answer; ``names``: whether each token of a text names what is seen."""
        wanted = np.array(tokens[1:])
        visual = self.target.family.visual_mask(prompt.ids).to(self.target.device)
        self.context.forget(0)
        self.blind.forget(0)
        stop = len(prompt)
        first = min(int(visual.nonzero()[-1]) + 1, stop - 1)
        with self._attending("the prompt after them", visual, range(first, stop)):
            prefill = self.context.load(0, prompt)
        last = prefill.hidden[self.last]
        for place, vectors in (("last states", last), ("inputs", prefill.hidden[0])):
            sizes = vectors.float().square().mean(-1).sqrt()
            for modality, chosen in (("visual", visual), ("text", ~visual)):
                self.sizes.setdefault(f"{place}, {modality}", []).append(sizes[chosen].cpu().numpy())
        with self._attending("the answer", visual, range(len(tokens) - 1)):
            after = self._over(self.context, tokens).hidden[self.last][0]  # the state that verifies the next token
        similarity = normalize(after.float(), dim=-1) @ normalize(last[visual].float(), dim=-1).T
        relevance = similarity.topk(min(LVSpecOptions().nearest, similarity.shape[1]), -1).values.mean(-1)
        self.blind.load(0, self.vlm.processor.text_only(prompt))
        without = self._over(self.blind, tokens).logits[0].argmax(-1).cpu().numpy()
        depends = {PROXY: without != wanted} | ({LEXICON: names(tokens)[1:]} if names else {})
        answer = Answer(relevance.cpu().numpy(), depends, dict(depends))
        for letter, drafter in self.views.items():
            logits = self._drafted(drafter.views[0], prompt, tokens)
            drafts = logits.argmax(-1).cpu().numpy()
            answer.hits[letter] = drafts == wanted
            if answer.confidence is None:
                top = logits.float().softmax(-1).topk(min(SageTree().k, logits.shape[-1])).values.tolist()
                answer.confidence = np.array([SageTree().confidence(each) for each in top])
                if names:
                    answer.touches[LEXICON] = depends[LEXICON] | [names([token])[0] for token in drafts.tolist()]
        return answer

    @contextmanager
    def _attending(self, whose: str, visual: Tensor, queries: range) -> Iterator[None]:
        """Measure how much of their attention some tokens of the block that runs inside give to visual ones.

        Shapes: visual ``[S]`` bool, of the prompt that the row begins with. ``queries``: places in the block.
        """
        if self.unread:
            yield
            return
        with AttentionProbe(self.target, queries=queries) as probe:
            yield
        layers = sorted(probe.columns)
        received = torch.stack([probe.columns[layer][0].to(visual.device) for layer in layers])
        to_visual = received[:, : len(visual)][:, visual].sum(-1)
        shares = to_visual / len(queries)
        self.attention.setdefault(whose, []).append(shares.cpu().numpy())

    def _over(self, context: Context, tokens: list[int]) -> ForwardOutput:
        context.cache.reserve(0, context.lengths[0] + len(tokens))
        return context.forward([0], torch.tensor([tokens[:-1]], device=self.target.device))

    def _drafted(self, view: View, prompt: Prompt, tokens: list[int]) -> Tensor:
        """Logits ``[n, V]`` of one view after every token of the answer but the last."""
        own = view.rewrite(prompt)
        self.session.forget(0)
        view.load(self.session, 0, own, len(own) + len(tokens), None)
        return self.session.run([0], [tokens[:-1]], every=True)[0]
