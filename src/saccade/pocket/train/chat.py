"""The chat format and its special tokens."""

from saccade.pocket.sample import GRID

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<image>", "<user>", "<assistant>")
PAD, BEGIN, END, IMAGE = range(4)
IMAGE_TOKENS = GRID * GRID

TEMPLATE = (
    "{{ '<s>' }}"
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
    "{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""Jinja template over Hugging Face messages; contents may be strings or lists of image and text parts."""


def prompt(question: str, image_tokens: int = 1) -> str:
    """The text of a first turn up to where the answer begins."""
    return f"<s><user>{'<image>' * image_tokens}{question}<assistant>"
