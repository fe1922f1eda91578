"""Replicas of the server on Ray Serve: a front, and after it deployments of the whole application.

Ray Serve keeps the number of replicas, replaces those that end or hang, and drains them when the application is
updated. `AffinityRouter` decides in the front's process where a request goes, by the queue lengths of Ray Serve.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from saccade.errors import SaccadeError
from saccade.ray_cluster import LOCAL, connected, limit_threads, places
from saccade.serve.app import make_app
from saccade.serve.configuration import KEYS_VARIABLE, ConfigError, ServerConfig, read_config
from saccade.serve.front import Forwarded, Front, QueueFull, ReplicaLost, ranked
from saccade.serve.service import Message

log = logging.getLogger("saccade.serve")
NAME = "saccade"  # of the application in Ray Serve
REPLICA = b"x-saccade-replica"  # header of every answer: the replica that gave it


class AffinityRouter(RequestRouter):
    """Prefers the replica that has a request's conversation or pictures."""

    def initialize_state(self, rows: int) -> None:
        self._rows = rows

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the replicas for a request; Ray Serve takes the least loaded one of the first group with room."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        lengths = self.replica_queue_len_cache
        loads = {name: lengths.get(replica.replica_id) for name, replica in by_name.items()}
        forwarded = pending_request.args[0] if pending_request is not None and pending_request.args else None
        key = forwarded.key if isinstance(forwarded, Forwarded) else ""
        return [[by_name[name] for name in group] for group in ranked(key, loads, self._rows)]


class Replica:
    """The whole application, which answers what the front passes on."""

    async def __init__(self, config: ServerConfig, keys: tuple[str, ...]) -> None:  # type: ignore[misc]  # Ray awaits it
        os.environ[KEYS_VARIABLE] = ",".join(keys)
        loaders = config.check()
        vlms = [await asyncio.to_thread(load) for load in loaders]
        for entry, vlm in zip(config.models, vlms, strict=True):
            limit_threads(vlm, entry.threads)
        self._app = make_app(config, vlms)
        self._service = self._app.state.service
        self._running = self._service.running(None)
        await self._running.__aenter__()
        self._name = serve.get_replica_context().replica_id.unique_id
        self._service.replica = f"{self._name}-"

    async def answer(self, forwarded: Forwarded) -> AsyncGenerator[list[Message]]:
        """Yield the messages of the application, those that are there together."""
        requests = iter([{"type": "http.request", "body": forwarded.body, "more_body": False}])
        messages: asyncio.Queue[Message | None] = asyncio.Queue()

        async def receive() -> Message:
            message = next(requests, None)
            if message is None:
                await asyncio.Event().wait()  # the front cancels this call when the client goes
                raise AssertionError
            return message

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (REPLICA, self._name.encode())]
            messages.put_nowait(message)

        async def work() -> None:
            try:
                await self._app({**forwarded.scope, "app": self._app}, receive, send)
            finally:
                messages.put_nowait(None)

        task = asyncio.create_task(work())
        try:
            ended = False
            while not ended:
                group = [await messages.get()]
                while not messages.empty():
                    group.append(messages.get_nowait())
                ended = group[-1] is None
                if part := [message for message in group if message is not None]:
                    yield part
            await task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task

    async def metrics(self) -> tuple[str, str]:
        return self._name, self._service.metrics.text().decode()

    async def check_health(self) -> None:
        """Raise where a step hangs or the engine's thread has ended, so that Ray Serve replaces this replica."""
        status, body = self._service.health()
        if status != 200:
            raise RuntimeError(str(body))


def build(config: ServerConfig, replicas: int | None = None, *, cpus: float = 1, gpus: float = 0) -> Any:
    limits, keys = config.limits, config.keys()
    per_replica = replace(limits, requests_per_key=0, requests_per_minute=0)
    routing = {"request_router_class": AffinityRouter, "request_router_kwargs": {"rows": limits.max_rows}}
    number = {} if replicas is None else {"num_replicas": replicas}
    engines = serve.deployment(
        name="Replica",
        max_ongoing_requests=2 * limits.max_rows,  # the next answers are prepared while these are generated
        max_queued_requests=limits.max_queue,
        graceful_shutdown_timeout_s=limits.drain_seconds,
        graceful_shutdown_wait_loop_s=1.0,
        health_check_period_s=5.0,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        request_router_config=RequestRouterConfig(**routing),
        **number,
    )(Replica)

    def front() -> Front:
        handle = serve.get_deployment_handle("Replica", serve.get_replica_context().app_name)
        answers = handle.options(method_name="answer", stream=True)

        async def call(forwarded: Forwarded) -> AsyncGenerator[list[Message]]:
            groups = answers.remote(forwarded)
            try:
                async for group in groups:
                    yield group
            except (asyncio.CancelledError, GeneratorExit):
                groups.cancel()  # not after an error, which it would raise again
                raise
            except BackPressureError as problem:
                raise QueueFull from problem
            except RayTaskError:
                raise  # of the application, whose log has it
            except (RayError, DeploymentUnavailableError) as problem:
                raise ReplicaLost from problem

        async def texts() -> dict[str, str]:
            return dict(await asyncio.to_thread(lambda: handle.broadcast("metrics").results(timeout_s=5)))

        os.environ[KEYS_VARIABLE] = ",".join(keys)
        return Front(replace(config, api_key_file=None), call, texts)

    behind = engines.bind(replace(config, api_key_file=None, limits=per_replica), keys)
    fronts = serve.deployment(
        name="Front",
        max_ongoing_requests=limits.connections,
        graceful_shutdown_timeout_s=limits.drain_seconds,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress(front)())
    return fronts.bind(behind)


def application(args: Mapping[str, Any]) -> Any:
    """Make the application of a ``serve.yaml``, as ``import_path: saccade.serve.replicas:application``."""
    unknown = sorted(set(args) - {"config", "cpus", "gpus"})
    if unknown or "config" not in args:
        raise ConfigError(f"args must have config, and may have cpus and gpus, not {unknown or dict(args)}.")
    resources = dict(args)
    return build(read_config(resources.pop("config")), **resources)


def serve_on_ray(read: Callable[[], ServerConfig], address: str, replicas: int | None) -> None:
    """Check everything, start the replicas, and serve until a signal.

    SIGHUP calls ``read`` again and replaces the replicas one after the other (Ray Serve's rolling update).
    """
    config = _checked(read)
    pockets = all(entry.target == "pocket" or entry.device == "cpu" for entry in config.models)
    threads = [entry.threads for entry in config.models if entry.threads]
    with connected(address, replicas) as module:
        room = places(module, replicas, max(threads, default=None), with_gpu=not pockets)
        where = "HeadOnly" if address == LOCAL else "EveryNode"
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        log.warning("Ray Serve's replicas listen on all addresses; nobody else may be in the network of this machine.")
        http = {"host": config.host, "port": config.port}
        serve.start(proxy_location=where, http_options=http, logging_config={"log_level": "WARNING"})

        def deploy(config: ServerConfig) -> None:
            application = build(config, room.count, cpus=room.cpus, gpus=room.gpus)
            serve.run(application, name=NAME, route_prefix="/", blocking=False)

        came: deque[int] = deque()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, lambda got, _: came.append(got)) for number in signals}
        try:
            deploy(config)
            names = ", ".join(config.labels)
            at = f"http://{config.host}:{config.port}"
            print(f"Serving {names} by {room.count} replicas on {at}/v1 (Ctrl-C drains and ends)", file=sys.stderr)
            while True:
                while not came:
                    time.sleep(0.5)  # pausing could miss a signal that came just before
                if came.popleft() != signal.SIGHUP:
                    break
                try:
                    deploy(_checked(read, (config.host, config.port)))
                    print("Replaced every replica by one of the configuration as it is now.", file=sys.stderr)
                except SaccadeError as problem:
                    print(f"saccade: {problem} The replicas stay as they are.", file=sys.stderr)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            serve.delete(NAME)
            if address == LOCAL:
                serve.shutdown()


def _checked(read: Callable[[], ServerConfig], at: tuple[str, int] | None = None) -> ServerConfig:
    config = read()
    if not config.port:
        raise ConfigError("Replicas need a port that is known before; give --port another number than 0.")
    if at is not None and (config.host, config.port) != at:
        raise ConfigError("The address of a running server cannot change; start it again for another one.")
    config.check()
    return config
