"""Which tokens of an image ViSpec shows its drafter, and what it tells later words of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from heads_kit import POLICIES, engine, entries_of, random_head, touching_images
from saccade.draft.heads.vispec import ViSpec, runs_of
from saccade.engine import Request

VISUAL = torch.tensor([0, 1, 1, 1, 0, 0, 1, 0], dtype=torch.bool)


def vispec(queries: int = 2) -> ViSpec:
    head = random_head("llava", "vispec", queries=queries)
    assert isinstance(head, ViSpec)
    return head


@pytest.mark.parametrize(
    ("queries", "tokens", "sources"),
    [
        (2, [3, 4, 5, 6, 7], [-1, 3, 4, -1, 6]),
        (3, [2, 3, 4, 5, 6, 7], [-1, -1, 3, 4, -1, 6]),
        (9, [1, 2, 3, 4, 5, 6, 7], [-1, -1, -1, 3, 4, -1, 6]),
    ],
)
def test_an_image_has_as_many_entries_as_vectors_but_one(queries: int, tokens: list[int], sources: list[int]) -> None:
    assert [part.tolist() for part in vispec(queries).entries(VISUAL)] == [tokens, sources]


def test_a_prompt_that_begins_with_its_image() -> None:
    visual = torch.tensor([1, 1, 0, 0], dtype=torch.bool)
    assert [part.tolist() for part in vispec().entries(visual)] == [[1, 2, 3], [-1, 1, 2]]
    assert [part.tolist() for part in vispec().entries(visual[1:])] == [[1, 2], [0, 1]]


def test_runs_end_where_images_touch() -> None:
    assert runs_of(VISUAL) == [(1, 4), (6, 7)]
    assert runs_of(VISUAL, [3, 7]) == [(1, 3), (3, 4), (6, 7)]
    assert runs_of(torch.ones(2, dtype=torch.bool)) == [(0, 2)]


@torch.no_grad()
def test_words_are_told_of_the_last_image_before_them() -> None:
    head, embeddings = vispec(3), torch.randn(8, 64)
    one, two = head.adaptor(embeddings[1:4]), head.adaptor(embeddings[6:7])
    zero = torch.zeros(64)
    expected = [
        (one[0], zero),
        (one[1], zero),
        (embeddings[4], one[2]),
        (embeddings[5], one[2]),
        (two[0], one[2]),
        (embeddings[7], two[2]),
    ]
    torch.testing.assert_close(head.embed(embeddings, VISUAL), torch.stack([torch.cat(pair) for pair in expected]))


def test_a_second_image_that_touches_the_first_is_compressed_alone_in_every_turn() -> None:
    """The cache holds one entry per image, whether it came in the first prompt or in a later one."""
    base, both = touching_images()
    again = replace(both, media=(base.media[0], replace(both.media[1], digest="another")))
    head = random_head("llava", "vispec")
    under, lengths, guesses = engine("llava", head, POLICIES["chain"]), [], []
    for asked in ([both], [base, again]):
        session = under.open(1)
        for prompt in asked:
            under.generate([Request(prompt)], max_new_tokens=1, session=session)
        entries = entries_of(session)
        images, latest = entries._images[0], entries._global[0]
        assert torch.equal(latest, images[-1].vectors[-1])
        assert not torch.equal(latest, images[0].vectors[-1])
        cache = entries.cache
        lengths.append(cache.lengths)
        guesses.append(torch.cat(cache.export(0)[0]))
    words = len(both) - sum(medium.n_tokens for medium in both.media)
    assert lengths == [[words + 1], [words + 1]]  # two images, and no entry for the first token
    torch.testing.assert_close(*guesses, atol=1e-4, rtol=1e-4)  # roundings of float32 at size 1
