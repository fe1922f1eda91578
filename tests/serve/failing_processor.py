"""An input processor that fails in every way a decoder can; the fork server imports it from here."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from saccade.errors import InputError, KilledError
from saccade.inputs.processor import InputProcessor


class FailingProcessor(InputProcessor):
    """Fails at media as the text of the last message says."""

    def __init__(self, processor: InputProcessor) -> None:
        vars(self).update(vars(processor))

    def load_media(self, messages: Any, *arguments: Any, **options: Any) -> Any:
        what = messages[-1]["content"][-1]["text"]
        if what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "kill the decoder":
            raise KilledError("The process that decodes a video was killed; try again.")
        if what == "leave":
            os._exit(0)
        if what == "hang":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            time.sleep(600)
        if what == "grow":
            bytearray(1 << 34)
        if what == "grow in Torch":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 17179869184 bytes.")
        if what == "environment":
            raise InputError(" ".join(os.environ))
        if what == "mistake":
            raise KeyError(what)
        return super().load_media(messages, *arguments, **options)
