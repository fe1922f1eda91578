"""Ray: a cluster of this machine's own, or one by its address, and what an engine reserves there.

Whoever reaches Ray's processes, and has their token where they ask for one, can run code. A cluster of this machine's
own listens on loopback; one of several machines belongs in a network of its own.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import torch

from saccade.cpu import SMALL_MODEL
from saccade.errors import SaccadeError

if TYPE_CHECKING:
    from saccade.vlm import VLM

LOCAL = "local"  # address of a cluster that this process starts and ends
OBJECT_STORE = 256 << 20  # bytes of shared memory of a cluster of this machine's own; records and requests are small
_CONNECT_SECONDS = 10
_JOINING = (
    "; start one with `ray start --head`, and give this command the cluster's RAY_AUTH_MODE and RAY_AUTH_TOKEN where "
    "it has them."
)
_ADDRESS = re.compile(r"auto|[\w.\-]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")


@dataclass(frozen=True)
class Places:
    count: int  # of engines
    cpus: int  # cores that each one reserves, which are its threads on a CPU
    gpus: int  # GPUs that each one reserves, 0 or 1
    per_machine: int  # largest number of engines on one machine when they are spread evenly


def load_ray(address: str) -> Any:
    """Import Ray; with `LOCAL`, all processes of this import stay on loopback."""
    if address == LOCAL:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray makes 127.0.0.1 this machine's address
    try:
        return import_module("ray")
    except ImportError:
        raise SaccadeError("Ray is missing; run `pip install 'saccade[ray]'`.") from None


def check_address(address: str) -> str:
    """Return the address of a cluster: ``local``, ``auto`` or HOST:PORT."""
    if address.startswith("ray://"):
        raise SaccadeError(
            "An address ray:// is for Ray's remote client, which streams no answers; run the command on a machine of "
            "the cluster with --ray=auto, or by `ray job submit`."
        )
    if address != LOCAL and not _ADDRESS.fullmatch(address):
        raise SaccadeError(
            f"{address!r} is no address of a Ray cluster; expected auto or HOST:PORT, or --ray as the last option for "
            "one of this machine's own."
        )
    return address


@contextmanager
def connected(address: str, engines: int | None = None) -> Iterator[Any]:
    """Connect to a cluster, or start one of this machine's own, with room for some engines however few cores it has."""
    check_address(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = load_ray(address)
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    failed, advice = f"reach the cluster at {address}", _JOINING
    try:
        if address == LOCAL:
            failed, advice = "start", "."
            print("Starting Ray on this machine; it may take two minutes.", file=sys.stderr, flush=True)
            options |= {"num_cpus": max(os.cpu_count() or 1, engines or 1), "object_store_memory": OBJECT_STORE}
            options |= {"_node_ip_address": "127.0.0.1", "include_dashboard": False}
        elif ":" in address:  # where nothing listens Ray would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
        ray.init(**options)
        if address == LOCAL and not ip_address(ray.util.get_node_ip_address()).is_loopback:
            ray.shutdown()
            raise RuntimeError("it listens beyond loopback, because this process imported ray before Saccade did")
    except (RuntimeError, ValueError, OSError) as problem:
        reason = " ".join(str(problem).split())[:300].rstrip(".")
        raise SaccadeError(f"Ray cannot {failed}: {reason}{advice}") from problem
    try:
        yield ray
    finally:
        sys.stdout.flush()
        ray.shutdown()


def limit_threads(vlm: VLM, threads: int | None) -> None:
    """Let a small model on a CPU run on one thread, whatever Ray has reserved, unless the user gave a number."""
    if threads is None and vlm.target.model.num_parameters() < SMALL_MODEL:
        torch.set_num_threads(1)


def places(ray: Any, count: int | None, threads: int | None, with_gpu: bool) -> Places:
    """Find room for engines: one per GPU that models may use; without GPUs one per machine, or ``count``."""
    if count is not None and count < 1:
        raise SaccadeError(f"The number of engines must be at least 1, not {count}.")
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0)) if with_gpu else 0
    machines = max(sum(node["Alive"] for node in ray.nodes()), 1)
    count = count or gpus or machines
    per_machine = -(-count // machines)
    cores = int(resources.get("CPU", 1)) // machines
    cpus = 1 if gpus else threads or max(cores // per_machine, 1)
    return Places(count, cpus, 1 if gpus else 0, per_machine)
