"""Rows in the layouts of the ready mappings, as evaluation code of August 2026 reads them, and what becomes of them."""

from __future__ import annotations

from typing import Any

from PIL import Image

from media_files import encoded


def png(colour: str = "red") -> dict[str, Any]:
    """A picture as `datasets` leaves it when it does not decode."""
    return {"bytes": encoded("PNG", Image.new("RGB", (24, 24), colour)), "path": None}


def _pictures(count: int, columns: int = 5, first: int = 0) -> dict[str, Any]:
    return {f"image_{n}": png() if n < first + count else None for n in range(first, first + columns)}


def _interleaved(task: str, question: str, count: int) -> dict[str, Any]:
    own = {"sample_id": 3, "sub_task": task, "question_type": "open-ended", "question": question, "answer": "It moved."}
    return {**own, **_pictures(count)}


_VQA = {"question_id": 9, "question": "What is it?", "image": png()}
_TEN = ["red"] * 7 + ["dark red"] * 3
ROWS: dict[str, dict[str, Any]] = {
    "textvqa": {**_VQA, "answers": _TEN, "ocr_tokens": ["EXIT"]},
    "vqav2": {**_VQA, "answers": [{"answer": a, "answer_confidence": "yes", "answer_id": 1} for a in _TEN]},
    "gqa": {"id": "201", "imageId": "n1", "question": "Is it red?", "answer": "yes", "image": png()},
    "mathvista": {"pid": "1", "query": "Hint: give a number.\nQuestion: How many?", "question": "How many?"}
    | {"answer": "2", "choices": None, "decoded_image": png(), "image": "images/1.jpg"},
    "scienceqa": {"hint": "", "question": "Which one?", "choices": ["iron", "wood"], "answer": 1, "image": png()},
    "mmmu": {
        "id": "validation_Art_1",
        "question": "Compare <image 2> with <image 1>. Which is <image 2>?",
        "options": "['red', 'blue']",
        "question_type": "multiple-choice",
        "answer": "B",
        **_pictures(2, 7, 1),
    },
    "seed-bench": {"question_id": "7", "question": "What is it?", "image": [png(), png("blue")], "answer": "C"}
    | {"choice_a": "a", "choice_b": "b", "choice_c": "c", "choice_d": "d", "data_type": "image"},
    "seed-bench-2": {"question_id": "7", "question": "<img> What is it?", "image": [png()], "answer": "A"}
    | {"choice_a": "a", "choice_b": "b", "choice_c": "c", "choice_d": "d", "data_type": "Single Image", "data_id": "1"},
    "mmt-bench": {
        "index": 1,
        "question": "What is it?",
        "image": png(),
        "answer": "B",
        "l2-category": "x",
        "split": "VAL",
    }
    | dict.fromkeys("CDEFGHI")
    | {"A": "cat", "B": "dog"},
    "spot-the-diff": _interleaved("Spot-the-Diff", "Explain the disparities. <image> <image> Difference:", 2),
    "pororo-sv": _interleaved("PororoSV", "".join(f"<image> Caption #{n}: c. " for n in range(1, 6)), 5),
    "vdc": {"video_name": "clip", "caption": "A ball rolls."},
    "video-mme": {"videoID": "clip", "question_id": "1-1", "question": "What?", "answer": "B"}
    | {"options": ["A. A cat.", "B. A dog."], "duration": "short", "domain": "x"},
    "mvbench": {"video": "clip.mp4", "question": "How often?", "candidates": ["3", "2"], "answer": "2"},
    "long-video-bench": {"id": "x_0", "video_path": "clip.mp4", "question": "What?", "correct_choice": 1}
    | {"option0": "cat", "option1": "dog", "option2": "N/A", "option3": "N/A", "option4": "N/A"},
    "gsm8k": {"question": "How many?", "answer": "2 + 2 = 4\n#### 4"},
}
"""A row of one mapping of every kind; that of ``gqa`` with the columns of its second table."""

EXPECTED: dict[str, tuple[str, Any]] = {
    "textvqa": ("[image]What is it?\nAnswer the question using a single word or phrase.", _TEN),
    "mathvista": ("[image]Hint: give a number.\nQuestion: How many?", "2"),
    "scienceqa": (
        "[image]Which one?\nA. iron\nB. wood\nAnswer with the option's letter from the given choices directly.",
        "B",
    ),
    "mmmu": (
        "Compare [image] with [image]. Which is image 2?\nA. red\nB. blue\n\n"
        "Answer with the option's letter from the given choices directly.",
        "B",
    ),
    "seed-bench": (
        "[image][image]What is it?\nA. a\nB. b\nC. c\nD. d\n"
        "Answer with the option's letter from the given choices directly.",
        "C",
    ),
    "seed-bench-2": (
        "[image] What is it?\nA. a\nB. b\nC. c\nD. d\nAnswer with the option's letter from the given choices directly.",
        "A",
    ),
    "mmt-bench": (
        "[image]What is it?\nA: cat\nB: dog\nAnswer the question using a single character from the given options.",
        "B",
    ),
    "spot-the-diff": ("Explain the disparities. [image][image] Difference:", "It moved."),
    "pororo-sv": (" ".join(f"[image] Caption #{n}: c." for n in range(1, 6)), "It moved."),
    "video-mme": (
        "[video]Select the best answer to the following multiple-choice question based on the video. Respond with only "
        "the letter (A, B, C, or D) of the correct option.\nWhat?\nA. A cat.\nB. A dog.\nThe best answer is:",
        "B",
    ),
    "mvbench": ("[video]Question:How often?\nOption:\n(A) 3\n(B) 2\nOnly give the best option.", "B"),
    "long-video-bench": (
        "[video]What?\nA. cat\nB. dog\nAnswer with the option's letter from the given choices directly.",
        "B",
    ),
    "gsm8k": ("How many?", "2 + 2 = 4\n#### 4"),
}
"""Content of the message of a row, media as ``[image]`` and ``[video]``, and the right answer: one of every kind."""


def shown(content: list[dict[str, Any]]) -> str:
    """Content of a message in one text."""
    return "".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content)
