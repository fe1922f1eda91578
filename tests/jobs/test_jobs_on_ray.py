"""Jobs on Ray: actors that are lost, whose items others answer, and the same file in the end."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest

from isolated import ISOLATED, isolated
from saccade import ray_cluster
from saccade.cli.option_groups import with_local_ray
from saccade.errors import SaccadeError
from saccade.jobs.actors import HOPELESS, Actors, Hello
from saccade.resumable import Finished, Pending

FACTS: dict[str, Any] = {"method": {}, "target": {"digest": "a"}, "processor": {"digest": "b"}, "drafter": None}


class Lost(Exception):
    """An actor has ended."""


class Handle:
    """A pretended actor, which answers an item per message; ``at_item`` is called before and may raise `Lost`."""

    def __init__(self, at_item: Callable[[Pending], None], facts: dict[str, Any]) -> None:
        self.items: deque[Pending] = deque()
        self.at_item, self.ended, self.created = at_item, False, 0
        self.messages: deque[Any] = deque([Hello(facts, "there")])
        self.put = SimpleNamespace(remote=self._put)
        self.answers = SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=lambda: self))

    def _put(self, message: Any) -> None:
        if isinstance(message, list):
            assert self.created, "the time comes first"
            self.items.extend(message)
        else:
            self.created = message

    def __next__(self) -> Callable[[], Any]:
        if self.messages:
            return self.messages.popleft
        item = self.items.popleft()

        def work() -> Any:
            self.at_item(item)
            return Finished(item.number, [], [item.problem] if item.problem else [])

        return work


class Pretended:
    """What `Actors` uses of Ray."""

    exceptions = SimpleNamespace(RayError=Lost)

    def __init__(
        self, at_item: Callable[[Pending], None] = lambda _: None, facts: Sequence[dict[str, Any]] = (FACTS,)
    ) -> None:
        self.started: list[Handle] = []
        self._at_item, self._facts, self._rng = at_item, cycle(facts), random.Random(1)

    def make(self) -> Handle:
        self.started.append(Handle(self._at_item, next(self._facts)))
        return self.started[-1]

    def wait(self, streams: list[Handle], num_returns: int, fetch_local: bool) -> tuple[list[Handle], None]:
        ready = [s for s in streams if s.messages or s.items]
        assert ready, "every actor would wait without end"
        return [self._rng.choice(ready)], None

    def get(self, reference: Callable[[], Any]) -> Any:
        return reference()

    def kill(self, handle: Handle) -> None:
        handle.ended = True


def answered(ray: Pretended, count: int) -> list[Finished]:
    actors = Actors(ray, ray.make, count=2, ahead=3)
    assert actors.facts
    actors.begin(1)
    answers = list(actors.answers(Pending(number, "") for number in range(count)))
    actors.close()
    assert all(handle.ended for handle in ray.started)
    return answers


def test_every_item_is_answered_once_also_by_another_actor_than_the_one_that_was_lost() -> None:
    ray = Pretended()
    assert sorted(answer.number for answer in answered(ray, 20)) == list(range(20))
    assert len(ray.started) == 2
    lost = []

    def fail(item: Pending) -> None:
        if item.number in (4, 11) and item.number not in lost:
            lost.append(item.number)
            raise Lost

    ray = Pretended(fail)
    answers = answered(ray, 20)
    assert sorted(answer.number for answer in answers) == list(range(20))
    assert not [answer for answer in answers if answer.failures]
    assert len(ray.started) == 4


def test_an_item_that_ends_every_actor_gets_an_error_and_its_neighbours_their_answers() -> None:
    ends = []

    def fail(item: Pending) -> None:
        if item.number == 7 and not item.problem:
            ends.append(item.number)
            raise Lost("a reader has crashed")

    answers = {answer.number: answer for answer in answered(Pretended(fail), 20)}
    assert (len(answers), len(ends)) == (20, HOPELESS)
    assert [number for number, answer in answers.items() if answer.failures] == [7]
    assert answers[7].failures[0] == "4 actors ended while they answered it, the last one because a reader has crashed"


def test_a_job_whose_actors_all_end_at_once_ends_with_the_reason() -> None:
    def fail(_: Pending) -> None:
        raise Lost("The actor died.\nThe actor is dead because its node has died.")

    with pytest.raises(SaccadeError, match=r"^13 actors in a row ended .* because its node has died; the answers"):
        answered(Pretended(fail), 100)


def test_a_machine_that_has_loaded_other_weights_is_refused() -> None:
    other = {**FACTS, "target": {"digest": "c"}}
    with pytest.raises(SaccadeError, match=r"there has loaded another target .* digest is '[ac]', not '[ac]'"):
        answered(Pretended(facts=[other, FACTS]), 30)


def test_bad_addresses_and_a_missing_ray_are_named_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [ray_cluster.check_address(a) for a in ("auto", "head:6379", "[::1]:6379")]
    with pytest.raises(SaccadeError, match="'photos' is no address of a Ray cluster; expected auto or HOST:PORT"):
        ray_cluster.check_address("photos")
    with pytest.raises(SaccadeError, match="ray job submit"):
        ray_cluster.check_address("ray://head:10001")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=None))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    with (
        pytest.raises(SaccadeError, match=f"cannot reach the cluster at {nobody}: .*refused"),
        ray_cluster.connected(nobody),
    ):
        pass
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(SaccadeError, match=r"Ray is missing; run `pip install 'saccade\[ray\]'`"),
        ray_cluster.connected("local"),
    ):
        pass


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("batch a --ray", "batch a --ray=local"),
        ("batch --ray -o x", "batch --ray=local -o x"),
        ("batch --ray auto", "batch --ray auto"),
        ("batch --ray=auto -- --ray", "batch --ray=auto -- --ray"),
    ],
)
def test_the_option_may_stand_without_an_address(words: str, expected: str) -> None:
    assert with_local_ray(words.split()) == expected.split()


def test_engines_are_one_per_gpu_or_one_per_machine() -> None:
    def ray(machines: int, **resources: float) -> Any:
        return SimpleNamespace(nodes=lambda: [{"Alive": True}] * machines, cluster_resources=lambda: resources)

    large, small = ray(2, CPU=64, GPU=8), ray(1, CPU=8)
    assert ray_cluster.places(large, None, None, True) == ray_cluster.Places(8, 1, 1, 4)
    assert ray_cluster.places(large, None, None, False) == ray_cluster.Places(2, 32, 0, 1)
    assert ray_cluster.places(small, 3, None, True) == ray_cluster.Places(3, 2, 0, 3)
    assert ray_cluster.places(small, 3, 1, True) == ray_cluster.Places(3, 1, 0, 3)
    with pytest.raises(SaccadeError, match="at least 1, not 0"):
        ray_cluster.places(small, 0, None, True)


LISTENING = """
from saccade.ray_cluster import connected
with connected("local", 1) as ray:
    import psutil  # Ray's own copy
    ray.get(ray.remote(lambda: 1).remote())
    for process in psutil.Process().children(recursive=True):
        print(*(found.laddr.ip for found in process.net_connections() if found.status == "LISTEN"))
"""


@pytest.mark.ray
@pytest.mark.skipif(find_spec("ray") is None, reason="needs saccade[ray]")
def test_a_cluster_of_this_machine_listens_on_loopback_alone() -> None:
    """On the interfaces that this machine has, not in a network namespace, where there is nothing but loopback."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    words = [sys.executable, "-c", LISTENING]
    done = subprocess.run(words, env={**os.environ, **token}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Starting Ray on this machine" in done.stderr
    assert len(done.stdout.split()) > 3
    assert set(done.stdout.split()) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.ray
@ISOLATED
def test_what_an_actor_cannot_load_is_said_in_a_sentence(tmp_path: Path) -> None:
    """The pictures are good; the weights are torn, which shows where they are loaded."""
    weights = Path(ray_cluster.__file__).parent / "pocket" / "weights" / "draft"
    copytree(weights, tmp_path / "torn")
    file = next((tmp_path / "torn").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[: 1 << 20])
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "What?"}) + "\n")
    code = "from saccade.cli import main; main()"
    words = ["batch", str(tmp_path / "rows.jsonl"), "-t", str(tmp_path / "torn"), "-o", str(tmp_path / "out"), "--ray"]
    found = isolated([sys.executable, "-c", code, *words], seconds=500, code=2)
    assert "saccade: " in found
    assert "Traceback" not in found
    assert not (tmp_path / "out").exists()
