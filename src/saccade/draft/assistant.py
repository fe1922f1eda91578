"""Gemma 4's assistants as drafters: a few layers that attend to the target's own entries from one fixed position.

Every node's input is the embedding of its token beside its parent's output, for the root the target's last state. All
nodes stand at the root's position and attend to the committed entries of the target's last sliding and last full layer
that write entries, never to each other, so that there is no prefill and no cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.draft.drafter import WHOLE, Drafter, DrafterFacts, DraftSession, Loaded
from saccade.draft.heads.session import parents_of
from saccade.draft.trees.policy import Frontier, Proposer, Signals, TreePolicy, grow, signals_of
from saccade.errors import ModelError
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.stock import mask_labels, packing
from saccade.target_model.token_blocks import ForwardOutput, Layout, Span
from saccade.target_model.traits import entry_shapes, layer_types
from saccade.tree import DraftTree, Emitted, Rows
from saccade.verify.rule import Verdict


def shared_layers(text_config: Any) -> dict[str, int]:
    """The last layer of each kind that writes entries."""
    layers: dict[str, int] = {}
    kinds = layer_types(text_config)
    shapes = entry_shapes(text_config, len(kinds))
    for layer, (kind, shape) in enumerate(zip(kinds, shapes, strict=True)):
        if shape is not None:
            layers[kind] = layer
    return layers


def compared(config: Any, target_config: Any) -> dict[str, tuple[Any, Any]]:
    """Return what an assistant was made for beside what a target of this configuration has, by name."""
    ours, theirs = config.get_text_config(), target_config.get_text_config(decoder=True)
    entries = entry_shapes(theirs, theirs.num_hidden_layers)
    facts: dict[str, tuple[Any, Any]] = {
        "hidden size": (config.backbone_hidden_size, theirs.hidden_size),
        "vocabulary": (ours.vocab_size, theirs.vocab_size),
    }
    layers = shared_layers(theirs)
    for layer, kind in enumerate(ours.layer_types):
        own = ours.per_layer_config[layer]
        found = entries[layers[kind]] if kind in layers else None
        facts[f"number and size of key-value heads in layers of type {kind}"] = (
            (own.num_key_value_heads, own.head_dim),
            found and found[:2],
        )
    if "sliding_attention" in ours.layer_types:
        facts["sliding window"] = (ours.sliding_window, getattr(theirs, "sliding_window", None))
    return facts


def check_assistant(config: Any, target_config: Any) -> None:
    """Raise `ModelError`, naming what differs, unless an assistant was made for a target of this configuration."""
    for what, (made_for, value) in compared(config, target_config).items():
        if made_for != value:
            raise ModelError(
                f"The assistant was made for another target: its {what} is {made_for} but this target's is {value}; "
                "give the target that it was trained with."
            )


class AssistantDrafter(Drafter):
    """Drafter of a `Gemma4AssistantForCausalLM` or `Gemma4UnifiedAssistantForCausalLM` and its target."""

    def __init__(self, assistant: Target, target: Target, policy: TreePolicy) -> None:
        self.facts, self.policy = DrafterFacts.of(policy, is_early=False), policy
        check_assistant(assistant.config, target.config)
        self.assistant, self.target = assistant, target
        layers = shared_layers(target.text_config)
        self.layers = {kind: layers[kind] for kind in assistant.text_config.layer_types}
        devices = {target.layer_devices[layer] for layer in self.layers.values()}
        devices.add(target.device)
        if devices != {assistant.device}:
            raise ModelError(
                f"The assistant is on {assistant.device}, but what it reads of its target is on "
                f"{', '.join(sorted(map(str, devices)))}; load both on one device."
            )

    def open(self, rows: int, target: Context) -> AssistantDraftSession:
        return AssistantDraftSession(self, rows, target)


class AssistantDraftSession(DraftSession):
    """The target's last state of every row."""

    def __init__(self, drafter: AssistantDrafter, rows: int, target: Context) -> None:
        self._drafter = drafter
        self._context = target
        self._model = drafter.assistant.model
        self._last = len(drafter.target.layers)
        self._like: Tensor = self._model.pre_projection.weight
        self._shaping = drafter.policy.open(rows, target.target.device)
        # `[1, d]` per row, after the target's final norm at its last committed token
        self._states = [self._like.new_zeros(1, drafter.assistant.config.backbone_hidden_size) for _ in range(rows)]
        self._prompts = [0] * rows
        target.requirements.add_layers(self._last)

    def restart(self, row: int) -> None:
        self._shaping.restart(row)

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None, budget: int | None = None) -> Loaded:
        assert prefill is not None
        self.skip(row, prompt, prefill)
        if prefill.start < self._prompts[row]:  # not a later turn
            self._shaping.restart(row)
        self._prompts[row] = len(prompt)
        return WHOLE

    def skip(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        self._states[row] = prefill.hidden[self._last][-1:].to(self._like)

    def _take_states(self, rows: Rows, output: ForwardOutput, verdict: Verdict) -> None:
        node = verdict.path.gather(1, verdict.count[:, None])  # [A, 1]
        states = output.hidden[self._last].to(self._like)
        last = states.gather(1, node[..., None].expand(-1, -1, states.shape[2]))
        for place, row in enumerate(rows):
            self._states[row] = last[place]

    def forget(self, row: int) -> None:
        self._prompts[row] = 0
        self._shaping.restart(row)

    def observe(
        self, rows: Rows, tree: DraftTree, scores: Tensor, verdict: Verdict, output: ForwardOutput, drafted: bool
    ) -> None:
        self._take_states(rows, output, verdict)
        if drafted:
            self._shaping.observe(rows, verdict.on_proposed(tree))

    @torch.inference_mode()
    def propose(self, rows: Rows, new: Emitted, proposer: Proposer, limit: int) -> DraftTree:
        numbers = self._context.cache.numbers
        roots = tuple(tokens[-1] for tokens in new)
        places = tuple(self._context.lengths[row] for row in rows)
        numbers.send([roots, places, *self._context.numbers_of(rows)])
        positions = numbers.get(places)[:, None]
        states = torch.stack([self._states[row] for row in rows])  # [A, 1, d]
        ran: list[Tensor] = []

        def forward(states: Tensor, tokens: Tensor) -> Tensor:
            logits, outputs = self._forward(rows, states, tokens, positions)
            ran.append(outputs)
            return logits

        def run(frontier: Frontier) -> Tensor:
            return forward(parents_of(frontier, ran), frontier.tokens)

        first = forward(states, numbers.get(roots)[:, None])
        growth = self._shaping.begin(rows, numbers.get(roots), proposer)
        return grow(self._drafter.policy, growth, first, run, limit, rows, proposer.guide)

    def signals(self, rows: Rows) -> list[Signals]:
        return signals_of(self._shaping, rows)

    def _forward(self, rows: Rows, states: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[A, W, V]`` and outputs ``[A, W, d]`` after tokens ``[A, W]`` with their parents' states."""
        count = tokens.shape[1]
        model = self._model
        cache = self._context.cache
        embedded = self._drafter.target.embed(tokens).to(self._like)
        joint = torch.cat([embedded, states], -1)
        inputs = model.pre_projection(joint).flatten(0, 1)[None]
        cache.layout = Layout(self._spans(rows, count), slice(0, 0))
        shared = {}
        for kind, layer in self._drafter.layers.items():
            keys = self._like.new_zeros(())
            keys.saccade_layer = cache.layers[layer]  # type: ignore[attr-defined]
            shared[kind] = keys, keys
        with packing(model.model, cache):
            hidden = model.model(
                inputs_embeds=inputs,
                attention_mask=mask_labels(tuple(shared), inputs),
                position_ids=positions.expand(-1, count).reshape(1, -1),
                shared_kv_states=shared,
                use_cache=False,
                logits_to_keep=torch.arange(inputs.shape[1], device=inputs.device),  # all, by a number some
            ).last_hidden_state
        hidden = hidden[0].unflatten(0, tokens.shape)
        if model.config.use_ordered_embeddings:
            logits = model.masked_embedding(hidden, model.lm_head.weight)
        else:
            logits = model.lm_head(hidden)
        return logits, model.post_projection(hidden)

    def _spans(self, rows: Rows, count: int) -> Sequence[Span]:
        """Every row's committed entries for its nodes; in sliding layers those at most a window before them."""
        window = self._drafter.assistant.text_config.sliding_window + 1
        spans = []
        for place, row in enumerate(rows):
            length = self._context.lengths[row]
            near = None
            if length > window:
                near = self._like.new_zeros(1, count, length)
                near[..., : length - window] = torch.finfo(near.dtype).min
            masks = {"full_attention": None, "sliding_attention": near}
            spans.append(Span(row, place * count, count, self._context.cache.start(row), length, masks))
        return spans
