"""Facts that identify a run: software versions, device, git revision and models."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("saccade", "torch", "transformers", "numpy")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, platform, git revision, threads, and the names of the target's device and of the processor."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        **{name: metadata.version(name) for name in PACKAGES},
        "revision": revision(),
        "device": _device_name(device),
        "processor": _processor_name(),
        "threads": torch.get_num_threads(),
    }


def _device_name(device: torch.device) -> str:
    """Name such as ``cpu (AVX512)`` or ``cuda (NVIDIA H200)``."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        return f"cpu ({torch.backends.cpu.get_cpu_capability()})"
    return device.type


def _processor_name() -> str:
    """Name of the processor such as ``AMD EPYC``; its architecture where the system does not name it."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def revision() -> str | None:
    """Git revision of Saccade's own checkout, followed by ``+`` when files are modified; None outside a checkout."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit or _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # installed without git, or below someone else's repository
    return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no", ".") else "")


def _git(*arguments: str) -> str | None:
    """Output of a git command in Saccade's folder; None when it fails or git is not installed."""
    folder = Path(__file__).parent
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return None


def model_facts(model: Any, name: str = "") -> dict[str, Any]:
    """Kind, size, dtype and fingerprint of a loaded model, by the last name of a folder; by default its own."""
    text = model.config.get_text_config(decoder=True)
    name = name or str(model.config._name_or_path)
    path = Path(name)
    return {
        "name": path.resolve().name if path.is_dir() else name,
        "type": model.config.model_type,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": text.num_hidden_layers,
        "width": text.hidden_size,
        "vocabulary": text.vocab_size,
        "dtype": dtype_name(model),
        "digest": fingerprint(model),
    }


def dtype_name(model: torch.nn.Module) -> str:
    """Dtype of the first parameter, such as ``float32``."""
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def fingerprint(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> str:
    """Hash of the names, shapes and first weights, rounded to ``dtype``, of one row of every parameter."""
    hasher = hashlib.blake2b(digest_size=8)
    for name, weight in sorted(model.named_parameters()):
        hasher.update(f"{name}|{tuple(weight.shape)}|".encode())
        if weight.numel() and weight.device.type != "meta":
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # of a sharded model
            row = weight.detach()
            if row.dim():
                row = row[(row.shape[0] // 2, *[0] * (row.dim() - 2))]
            numbers = row.reshape(-1)[:32].to(dtype).float()
            hasher.update(numbers.cpu().numpy().tobytes())
    return hasher.hexdigest()
