"""A pair's forwards over the target's own answers, and what they say of drafting without running it.

Every view of the draft model reads the target's greedy answer, token by token. A greedy chain goes on where its
likeliest token is the target's, so the steps of speculative decoding follow from the places where it is.
"""

from __future__ import annotations

from collections.abc import Callable
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
from saccade.errors import MethodError
from saccade.inputs.families import family_of
from saccade.inputs.families.family import Prompt
from saccade.options import LVSpecOptions
from saccade.target_model.context import Context
from saccade.target_model.token_blocks import ForwardOutput
from saccade.vlm import VLM

GAMMA = 5  # length of the chains (TABED, Section 5)
Names = Callable[[list[int]], Array]  # whether each token of a text names what is seen


@dataclass(slots=True)
class Answer:
    """One answer; arrays have an entry for every token but the first."""

    relevance: Array  # A of LVSpec
    grounded: Array  # whether the target chooses another token without the pictures
    content: Array | None  # whether the token, or the first view's in its place, names what is seen; None: unknown
    hits: dict[str, Array] = field(default_factory=dict)  # view -> whether its likeliest token is the target's
    confidence: Array | None = None  # alpha of SAGE, of the first view


def steps(hits: Array, gamma: int = GAMMA) -> tuple[list[int], list[int]]:
    """Roots of a greedy chain's steps in an answer, and the draft tokens accepted in each."""
    roots, accepted, root = list[int](), list[int](), 0
    while root < len(hits):
        ahead = hits[root : root + gamma]
        roots.append(root)
        accepted.append(len(ahead) if ahead.all() else int(ahead.argmin()))
        root += accepted[-1] + 1
    return roots, accepted


class Moments:
    """Mean and size of vectors ``[n, d]``."""

    def __init__(self) -> None:
        self._count, self._total, self._sizes = 0, torch.zeros(1), 0.0

    def add(self, vectors: Tensor) -> None:
        self._count += len(vectors)
        self._total = self._total + vectors.double().sum(0).cpu()
        self._sizes += float(vectors.double().square().mean(-1).sqrt().sum())

    @property
    def mean(self) -> Tensor:
        return self._total / max(self._count, 1)

    @property
    def rms(self) -> float:
        """Mean over the vectors of the root of their components' mean square."""
        return self._sizes / max(self._count, 1)


class Probe:
    """Forwards of target and drafter over the target's own answers."""

    def __init__(self, vlm: VLM) -> None:
        self.vlm, self.target, self.last = vlm, vlm.target, len(vlm.target.layers)
        self.moments = {place: (Moments(), Moments()) for place in ("inputs", "last states")}  # visual, text
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
        prefill = self.context.load(0, prompt)
        last = prefill.hidden[self.last]
        for vectors, (of_visual, of_text) in zip((prefill.hidden[0], last), self.moments.values(), strict=True):
            of_visual.add(vectors[visual])
            of_text.add(vectors[~visual])
        after = self._over(self.context, tokens).hidden[self.last][0]  # the state that verifies the next token
        similarity = normalize(after.float(), dim=-1) @ normalize(last[visual].float(), dim=-1).T
        relevance = similarity.topk(min(LVSpecOptions().nearest, similarity.shape[1]), -1).values.mean(-1)
        self.blind.load(0, self.vlm.processor.text_only(prompt))
        without = self._over(self.blind, tokens).logits[0].argmax(-1).cpu().numpy()
        answer = Answer(relevance.cpu().numpy(), without != wanted, None if names is None else names(tokens)[1:])
        for letter, drafter in self.views.items():
            logits = self._drafted(drafter.views[0], prompt, tokens)
            drafts = logits.argmax(-1).cpu().numpy()
            answer.hits[letter] = drafts == wanted
            if answer.confidence is None:
                top = logits.float().softmax(-1).topk(min(SageTree().k, logits.shape[-1])).values.tolist()
                answer.confidence = np.array([SageTree().confidence(each) for each in top])
                if answer.content is not None and names is not None:
                    answer.content = answer.content | np.array([names([token])[0] for token in drafts.tolist()])
        return answer

    def _over(self, context: Context, tokens: list[int]) -> ForwardOutput:
        context.cache.reserve(0, context.lengths[0] + len(tokens))
        return context.forward([0], torch.tensor([tokens[:-1]], device=self.target.device))

    def _drafted(self, view: View, prompt: Prompt, tokens: list[int]) -> Tensor:
        """Logits ``[n, V]`` of one view after every token of the answer but the last."""
        own = view.rewrite(prompt)
        self.session.forget(0)
        view.load(self.session, 0, own, len(own) + len(tokens), None)
        return self.session.run([0], [tokens[:-1]], every=True)[0]
