"""*Sound*: the machine, what attention kernels take our calls, which executor runs a model, and the speed of light."""

from __future__ import annotations

import platform
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import saccade
from benchmarks import pocket_pair
from benchmarks.device.kit import Finding, Kit, Piece
from saccade.engine import Request
from saccade.loading import load_processor
from saccade.pocket import draft_path, draw, target_path
from saccade.target_model.cache import on_device
from saccade.target_model.token_blocks import additive

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def pieces(kit: Kit) -> Iterator[Piece]:
    yield "machine", partial(machine, kit)
    yield "speed of light", partial(speed_of_light, kit)
    yield "executor", partial(executor, kit)
    for dtype in (torch.bfloat16, torch.float32):
        yield f"attention in {str(dtype).removeprefix('torch.')}", partial(attention, kit, dtype)


def machine(kit: Kit) -> Iterator[Finding]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__, "saccade": saccade.__version__}
    facts: Finding = {"device": str(kit.device), "small": kit.small, "threads": torch.get_num_threads()}
    words = [f"{kit.device}, which is no GPU", *(f"{name} {version}" for name, version in versions.items())]
    if kit.device.type == "cuda":
        of = torch.cuda.get_device_properties(kit.device)
        facts |= {"name": of.name, "memory": of.total_memory, "processors": of.multi_processor_count}
        facts |= {"capability": f"{of.major}.{of.minor}", "tf32": torch.backends.cuda.matmul.allow_tf32}
        words[0] = f"{of.name}, {of.total_memory / 2**30:.0f} GiB"
        words.append(f"CUDA {torch.version.cuda}; clocks, power and driver: {clocks()}")
    yield {**facts, "versions": versions, "line": ", ".join(words)}


def clocks() -> str:
    """Clocks of processors and memory, power and the driver, where nvidia-smi tells them in time."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return "unknown"


def speed_of_light(kit: Kit) -> Iterator[Finding]:
    """What a copy moves and what matrix products compute; limits of the other parts."""
    elements, side = (2**18, 128) if kit.small else (2**31, 8192)
    source = torch.zeros(elements, dtype=torch.bfloat16, device=kit.device)
    aim = torch.empty_like(source)
    spent = kit.time(partial(aim.copy_, source), rounds=10)
    bandwidth = 2 * source.nbytes / spent["device_ms"] / 1e6
    yield {"gigabytes_per_second": bandwidth, "line": f"copies {bandwidth:.4g} GB/s, read and written"}
    del source, aim
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(side, side, dtype=dtype, device=kit.device) for _ in range(2))
        spent = kit.time(partial(torch.matmul, a, b), rounds=10)
        rate, name = 2 * side**3 / spent["device_ms"] / 1e9, str(dtype).removeprefix("torch.")
        yield {"dtype": name, "teraflops": rate, "line": f"{name} products {rate:.4g} TFLOP/s"}
    small = torch.zeros(8, device=kit.device)
    spent = kit.time(lambda: [small.add_(1) for _ in range(100)])
    yield {"launch_us": 10 * spent["host_ms"], "line": f"a launch {10 * spent['host_ms']:.3g} us of the host"}
    numbers = list(range(64))
    spent = kit.time(lambda: on_device(numbers, kit.device).tolist())
    yield {"round_trip_us": 1000 * spent["ms"], "line": f"to the device and back {1000 * spent['ms']:.3g} us"}


Call = tuple[str, int, int, int, int, int, int, str]
"""An attention call as the engine makes it: name, rows, heads, their key heads, queries, keys, head size, and mask:
none, causal (by the argument), added, or bools."""


def calls(small: bool) -> Iterator[Call]:
    keys = 96 if small else 2048
    for dim in (64, 128, 256):  # heads of a key head are folded into its queries
        yield f"one token, d {dim}", 1, 4, 4, 7, keys, dim, "none"
        yield f"tree of 60 folded, d {dim}", 1, 4, 4, 60 * 7, keys, dim, "added"
    yield "16 rows of 8 folded", 16, 4, 4, 8 * 7, keys, 128, "added"
    yield "tree of bools", 1, 4, 4, 60 * 7, keys, 128, "bools"
    yield "prompt, repeated heads", 1, 28, 28, keys // 4, keys, 128, "added"
    yield "prompt, causal argument", 1, 28, 28, keys // 4, keys // 4, 128, "causal"
    yield "one token, grouped heads", 1, 28, 4, 1, keys, 128, "none"
    yield "tree, grouped heads", 1, 28, 4, 60, keys, 128, "added"


def attention(kit: Kit, dtype: torch.dtype) -> Iterator[Finding]:
    """Which backends take each call, how long each needs, and which one is chosen."""
    if kit.pretend is not None:
        yield {"line": "left out: the pretend device has one kernel for all"}
        return
    for case, rows, heads, kv_heads, queries, keys, dim, kind in calls(kit.small):
        if kit.left <= 0:
            return
        shapes = [(heads, queries), (kv_heads, keys), (kv_heads, keys)]
        inputs = [torch.randn(rows, *shape, dim, dtype=dtype, device=kit.device) for shape in shapes]
        mask = _mask(kit, (rows, 1, queries, keys), kind, dtype)
        more = {"is_causal": kind == "causal", "enable_gqa": heads > kv_heads}
        run = partial(F.scaled_dot_product_attention, *inputs, mask, **more)
        spent: dict[str, float] = {}
        for name, backend in BACKENDS.items():
            with sdpa_kernel([backend]), warnings.catch_warnings(), suppress(RuntimeError):  # of calls it does not take
                warnings.simplefilter("ignore")
                spent[name] = kit.time(run, rounds=5)["device_ms"]
        chosen = kit.time(run, rounds=5)["device_ms"]
        asked = torch._fused_sdp_choice(*inputs, mask, 0.0, more["is_causal"], enable_gqa=more["enable_gqa"])
        name = next((name for name, backend in BACKENDS.items() if int(backend) == int(asked)), str(asked))
        times = ", ".join(f"{name} {ms:.3g}" for name, ms in spent.items())
        yield {"call": case, "backends": spent, "chosen": name, "ms": chosen, "line": f"{case}: {name} ({times} ms)"}


def _mask(kit: Kit, shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> Tensor | None:
    if kind in ("none", "causal"):
        return None
    seen = torch.rand(shape, device=kit.device) < 0.9
    seen[..., 0] = True
    return seen if kind == "bools" else additive(seen, dtype)


def executor(kit: Kit) -> Iterator[Finding]:
    """What runs the built-in pair, and whether its steps become graphs."""
    for dtype in ("bfloat16", "float32"):
        model, draft = (pocket_pair.load(path, dtype, str(kit.device)) for path in (target_path(), draft_path()))
        vlm = saccade.VLM(model, load_processor(str(target_path())), drafter=draft, method="chain")
        prompt = vlm.processor.prompt(draw(pocket_pair.FIRST_SEED, "scene").messages())
        session = vlm.engine.open(1)
        (output,) = vlm.engine.generate([Request(prompt)], session, max_new_tokens=64)
        fast, replays = vlm.target.executor, getattr(session.context.cache.graphs, "replays", 0)
        facts = {"dtype": dtype, "executor": fast.name, "replays": replays, "packs": vlm.target.stock_modules._packs}
        ran = f"{replays} replays of graphs" if getattr(fast, "enabled", False) else "no graphs"
        yield {**facts, "line": f"{dtype}: {fast.name}, {ran}, {output.stats.block_efficiency:.2f} tokens a pass"}
