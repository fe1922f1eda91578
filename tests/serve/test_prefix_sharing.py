"""What one request leaves in the caches is reused by those alone that may know it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from live_server import Live, asks, live, uri

BODY = {"model": "tiny", "messages": asks("What is in this picture, in all detail?", uri(5, (48, 48))), "max_tokens": 4}
FIRST, SECOND = {"authorization": "Bearer first"}, {"authorization": "Bearer second"}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("first\nsecond\n")
    return str(path)


def reused(server: Live, headers: dict[str, str], **fields: Any) -> tuple[int, int]:
    """Cached prompt tokens of a request, and media that it found in the cache."""
    before = server.service.owner.counts.media_hits.total()
    status, _, answer = server.call("POST", "/v1/chat/completions", json.dumps({**BODY, **fields}).encode(), headers)
    assert status == 200, answer
    usage = json.loads(answer)["usage"]
    server.until(lambda: server.is_idle)
    hits = server.service.owner.counts.media_hits.total() - before
    return usage["prompt_tokens_details"]["cached_tokens"], hits


@pytest.mark.parametrize("speculation", ["off", "chain"])
def test_another_key_learns_nothing_of_an_earlier_prompt(keys: str, speculation: str) -> None:
    with live(api_key_file=keys) as server:
        assert reused(server, FIRST, speculation=speculation) == (0, 0)
        assert reused(server, SECOND, speculation=speculation) == (0, 0)
        for key in (FIRST, SECOND):
            assert reused(server, key, speculation=speculation)[0] > 16


def test_a_salt_of_the_request_separates_within_a_key_and_without_keys(keys: str, shared: Live) -> None:
    with live(api_key_file=keys) as server:
        assert reused(server, FIRST, cache_salt="a") == (0, 0)
        assert reused(server, SECOND, cache_salt="a") == (0, 0)
        assert reused(server, FIRST, cache_salt="a")[0] > 16
    assert reused(shared, {}, cache_salt="b") == (0, 0)
    assert reused(shared, {}, cache_salt="c") == (0, 0)
    assert reused(shared, {}, cache_salt="b")[0] > 16


def test_keys_share_where_the_server_says_so(keys: str) -> None:
    with live(api_key_file=keys, share_prefixes=True) as server:
        assert reused(server, FIRST) == (0, 0)
        assert reused(server, SECOND)[0] > 16


def test_nothing_is_reused_where_reuse_is_off() -> None:
    with live(reuse_prefixes=False, max_rows=1) as server:
        for _ in range(2):
            assert reused(server, {}, n=2) == (0, 0)
            assert reused(server, {}, cache_salt="a") == (0, 0)


def test_an_empty_salt_is_refused(shared: Live) -> None:
    status, answer = shared.post({**BODY, "cache_salt": ""})
    assert status == 400
    assert "cache_salt" in answer["error"]["message"]
