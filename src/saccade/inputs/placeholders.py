"""Text-only prompts for drafters without vision."""

from __future__ import annotations

from typing import Any

from saccade.inputs.batching import media_spans
from saccade.inputs.families import family_of
from saccade.inputs.prompt import Prompt


def without_media(config: Any, tokenizer: Any, prompt: Prompt) -> Prompt:
    """Put one newline in the place of every image or video (the T view of TABED).

    A medium is removed with everything between its placeholders (row breaks, tile tags, timestamps) and with its
    wrapper tokens.
    """
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
    ids: list[int] = []
    end = 0
    for start, stop in spans_with_wrappers(config, tokenizer, prompt):
        ids += [*prompt.ids[end:start], newline]
        end = stop
    return Prompt((*ids, *prompt.ids[end:]))


def spans_with_wrappers(config: Any, tokenizer: Any, prompt: Prompt) -> list[tuple[int, int]]:
    """Disjoint ``[start, end)`` of every medium with its wrappers, in prompt order; arguments as in `without_media`."""
    openers, closers = _wrapper_ids(config, tokenizer)
    ids = prompt.ids
    spans = sorted(media_spans(config, prompt))
    out: list[tuple[int, int]] = []
    for n, (start, stop) in enumerate(spans):
        floor = out[-1][1] if out else 0
        ceiling = spans[n + 1][0] if n + 1 < len(spans) else len(ids)
        while start > floor and ids[start - 1] in openers:
            start -= 1
        while stop < ceiling and ids[stop] in closers:
            stop += 1
        if family_of(config).stamps_video:
            # the template's own wrappers enclose the first timestamp and the last patch
            opened = sum(i in openers for i in ids[start:stop])
            closed = sum(i in closers for i in ids[start:stop])
            while opened < closed and start > floor:
                start -= 1
                opened += ids[start] in openers
        out.append((start, stop))
    return out


def _wrapper_ids(config: Any, tokenizer: Any) -> tuple[set[int], set[int]]:
    family = family_of(config)
    words = family.words(tokenizer)
    if words is None:
        return set(), set()
    openers, closers = family.wrappers(words)
    vocabulary = tokenizer.get_vocab()
    return {vocabulary[w] for w in openers & vocabulary.keys()}, {vocabulary[w] for w in closers & vocabulary.keys()}
