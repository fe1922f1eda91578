"""Environment of a run (versions, device, threads, revision) and peak memory."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from saccade.draft.heads.head import Head

PACKAGES = ("saccade", "torch", "transformers", "numpy")
_LOOKED_AT = 32


def environment(device: torch.device) -> dict[str, Any]:
    """What the records of a run share.

    Args:
        device: of the target.
    """
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        **{name: metadata.version(name) for name in PACKAGES},
        "revision": revision(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }


def device_name(device: torch.device) -> str:
    """Such as ``cpu (AVX512)`` or ``cuda (NVIDIA H200)``."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    if device.type == "cpu":
        return f"cpu ({torch.backends.cpu.get_cpu_capability()})"
    return device.type


def revision() -> str | None:
    """The git revision of Saccade's own checkout, ``+`` behind it where files were changed; None elsewhere."""
    folder = Path(__file__).parent
    found = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not found or _git(folder, "ls-files", "--error-unmatch", "environment.py") is None:
        return None  # installed without git, or below someone else's repository
    return found + ("+" if _git(folder.parent, "status", "--porcelain", "--untracked-files=no", ".") else "")


def model_facts(model: Any, name: str) -> dict[str, Any]:
    """A model's kind and size.

    Args:
        model: a loaded Hugging Face model.
        name: as the user called it; of a folder only the last part is kept.
    """
    text = model.config.get_text_config(decoder=True)
    path = Path(name)
    return {
        "name": path.resolve().name if path.is_dir() else name,
        "type": model.config.model_type,
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": text.num_hidden_layers,
        "width": text.hidden_size,
        "vocabulary": text.vocab_size,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }


def head_facts(head: Head, name: str) -> dict[str, Any]:
    """The same of a trained head; its vocabulary and embeddings are the target's."""
    config = head.config
    return {
        "name": name,
        "type": head.kind,
        "parameters": sum(p.numel() for p in head.parameters()),
        "layers": head.blocks,
        "width": config.hidden_size,
        "vocabulary": config.vocab_size,
        "options": dict(config.options),
        "digest": fingerprint(head),
        "dtype": str(next(head.parameters()).dtype).removeprefix("torch."),
    }


def fingerprint(model: torch.nn.Module) -> str:
    """Hash of names, shapes and some numbers of every parameter: another one after any training."""
    hasher = hashlib.blake2b(digest_size=8)
    for name, weight in sorted(model.named_parameters()):
        hasher.update(f"{name}|{tuple(weight.shape)}|".encode())
        if weight.numel() and weight.device.type != "meta":
            row = (
                weight.detach()[(weight.shape[0] // 2, *[0] * (weight.dim() - 2))] if weight.dim() else weight
            )
            some = row.detach().reshape(-1)[:_LOOKED_AT]
            hasher.update(some.float().cpu().numpy().tobytes())
    return hasher.hexdigest()


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None when it fails or there is no git."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_PEAK = "5"  # see proc(5)


class PeakMemory:
    """Forgets the peak so far, and reads the new one later."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._works = device.type == "cuda" or _reset()

    def start(self) -> None:
        """Begin anew."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._works:
            _reset()

    def read(self) -> int | None:
        """Bytes at the highest point since `start`; None where they cannot be known."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        if not self._works:
            return None
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024


def _reset() -> bool:
    try:
        _CLEAR.write_text(_RESET_PEAK)
        return "VmHWM:" in _STATUS.read_text()
    except OSError:
        return False
