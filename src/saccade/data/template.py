"""Prompts with fields of rows."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from saccade.errors import InputError


class Template:
    """Prompt with fields of the items, such as ``Describe {name}``; ``{{`` and ``}}`` are braces."""

    def __init__(self, text: str) -> None:
        if not text.strip():
            raise InputError("The prompt is empty; give a question, such as 'Describe the picture.'.")
        try:
            found = list(string.Formatter().parse(text))
        except ValueError:
            raise InputError(f"The prompt {text!r} has a single brace; write {{{{ and }}}} for braces.") from None
        for _, name, form, how in found:
            if name is not None and (not name.isidentifier() or form or how):
                raise InputError(
                    f"The prompt has the field {{{name}}}, which is no plain name; write {{{{ and }}}} for braces."
                )
        self._pieces = [(before, name) for before, name, _, _ in found]
        self.names = [name for _, name in self._pieces if name is not None]  # of its fields, in order

    def fill(self, fields: Mapping[str, Any]) -> str:
        """Return the prompt of an item."""
        filled = []
        for before, name in self._pieces:
            filled.append(before)
            if name is None:
                continue
            if name not in fields:
                raise InputError(f"the prompt names {{{name}}}, but the item has {', '.join(fields) or 'no fields'}")
            value = fields[name]
            if isinstance(value, bool) or not isinstance(value, (str, int, float)):
                raise InputError(f"the prompt's field {name} must be a text or a number, not {str(value)[:60]!r}")
            filled.append(str(value))
        return "".join(filled)
