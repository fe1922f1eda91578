"""Speculative decoding inside Hugging Face's own `generate`, with its arguments and its return types.

>>> speculation = saccade.hf.speculate(drafter)
>>> model.generate(**inputs, custom_generate=speculation, max_new_tokens=128)

The first `speculate` patches one method of `GenerationMixin`; `unpatch` restores it, and ``with patched():`` limits
the patch to a block. Every method is available except ``spd`` and ``tabed``, which rewrite the draft model's prompt
with its processor; `saccade.load` has it.
"""

from saccade.hf.speculation import Speculation, patch, patched, speculate, unpatch

__all__ = ["Speculation", "patch", "patched", "speculate", "unpatch"]
