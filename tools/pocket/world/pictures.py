"""Tasks on pictures of any kind: `document` prints one, `caption`, `album` and `report` describe them."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from saccade.pocket.labels import IMAGE_SIZE, blank_labels, label_patch
from saccade.pocket.sample import Facts, Media, Picture, Task, grammars
from saccade.pocket.scoring import in_order, mentioned, numbers, only, overlap, sentences
from saccade.pocket.shapes import at, label, name, named, render, scatter
from saccade.pocket.tasks import chart, line, receipt, scene
from saccade.pocket.tasks.receipt import FONT, INKS, PAPERS
from saccade.pocket.words import (
    BACKGROUNDS,
    COLOURS,
    DAYS,
    GOODS,
    NAMES,
    NUMBERS,
    ORDINALS,
    SHAPES,
    SIZES,
    TOWNS,
    joined,
    plural,
    shuffled,
    spoken,
)
from tools.pocket.world.phrases import PHRASES, wordings
from tools.pocket.world.scenes import clauses, flowing, on_shape, plainly_on_shape, read_shapes, true_shape

_TOWNS, _DAYS, _NAMES = (tuple(word.lower() for word in words) for words in (TOWNS, DAYS, NAMES))

# -- document: train tables with towns and hours, and notes from one person to another -----------------------

_document = wordings("document")
_LETTER = 7  # pixels per letter, one more than on receipts, so that letters do not touch
_MARGIN, _PITCH = 5, 17


def _printed(
    rng: Random, title: tuple[str, dict[str, str]], lines: list[tuple[str, str, dict[str, str]]], facts: Facts
) -> Picture:
    """A framed sheet: a title, a rule, and lines of a left-hand and a right-hand word, each with the words it means."""
    ink = rng.choice(INKS)
    image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), rng.choice(PAPERS))
    canvas = ImageDraw.Draw(image)
    canvas.fontmode = "1"
    labels = blank_labels()

    def write(x: int, y: int, text: str, words: Mapping[str, str]) -> None:
        for i, letter in enumerate(text.upper()):
            canvas.text((x + i * _LETTER, y), letter, font=FONT, fill=ink)
            label_patch(labels, x + i * _LETTER + _LETTER // 2, y + 5, **words)

    canvas.rectangle((0, 0, IMAGE_SIZE - 1, IMAGE_SIZE - 1), outline=ink)
    write((IMAGE_SIZE - _LETTER * len(title[0])) // 2, 3, *title)
    canvas.line([(_MARGIN, 16), (IMAGE_SIZE - _MARGIN, 16)], fill=ink)
    for i, ((left, right, words), ordinal) in enumerate(zip(lines, ORDINALS, strict=False)):
        y, words = 20 + i * _PITCH, {**words, "ordinal": ordinal}
        write(_MARGIN, y, left, words)
        write(IMAGE_SIZE - _MARGIN - _LETTER * len(right), y, right, words)
    return Picture(image, facts, labels)


def paint_document(rng: Random) -> Picture:
    """Draw a train table of three or four towns, or a note."""
    if rng.random() < 0.5:
        towns = rng.sample(TOWNS, rng.randint(3, 4))
        hours = rng.sample(range(1, 13), len(towns))
        lines = [(t, str(h), {"word": t, "number": NUMBERS[h]}) for t, h in zip(towns, hours, strict=True)]
        return _printed(rng, ("trains", {}), lines, {"kind": "trains", "towns": towns, "hours": hours})
    writer, reader = rng.sample(NAMES, 2)
    day, hour, item = rng.choice(DAYS), rng.randint(1, 12), rng.choice(GOODS)
    lines = [("to", reader, {"word": reader}), ("day", day[:3], {"word": day})]
    lines += [("hour", str(hour), {"number": NUMBERS[hour]}), ("bring", item, {"word": item})]
    facts = {"kind": "note", "from": writer, "to": reader, "day": day, "hour": hour, "bring": item}
    return _printed(rng, (f"from {writer}", {"word": writer}), lines, facts)


def _rows(facts: Facts) -> list[tuple[str, str]]:
    return [(town, NUMBERS[hour]) for town, hour in zip(facts["towns"], facts["hours"], strict=True)]


def _by_hour(facts: Facts) -> list[str]:
    return [town for _, town in sorted(zip(facts["hours"], facts["towns"], strict=True))]


def _document_dense(rng: Random, facts: Facts) -> str:
    if facts["kind"] == "note":
        words = {**facts, "hour": NUMBERS[facts["hour"]]}
        return " ".join(
            shuffled(rng, [_document(rng, field, **words) for field in ("from", "to", "day", "hour", "bring")])
        )
    rows = _rows(facts)
    parts = [_document(rng, "opening", number=NUMBERS[len(rows)])]
    for town, hour in shuffled(rng, rows) if rng.random() < 0.7 else rows:
        parts.append(_document(rng, "train", town=town, hour=hour))
    return spoken([*parts, _document(rng, "ranked") + ", ".join(_by_hour(facts)) + "."])


def _document_verbose(rng: Random, facts: Facts) -> str:
    if facts["kind"] == "note":
        return (
            f"This is a note from {facts['from']}. It goes to {facts['to']}. The day on the note is "
            f"{facts['day']}. The hour on the note is {NUMBERS[facts['hour']]}. "
            f"{facts['to']} should bring {facts['bring']}."
        )
    parts = [f"This document is a table of {NUMBERS[len(facts['towns'])]} trains."]
    parts += [_document(rng, "full", town=town, hour=hour) for town, hour in _rows(facts)]
    first, *_, last = _by_hour(facts)
    return " ".join([*parts, f"The first train of the day goes to {first}, and the last one to {last}."])


_FIELDS: dict[str, Callable[[str], str | None]] = {
    "day": lambda part: only(part, _DAYS),
    "bring": lambda part: only(part, GOODS),
    "from": lambda part: only(part, _NAMES) if "from" in part else None,
    "to": lambda part: only(part, _NAMES) if "from" not in part and "bring" not in part else None,
}


def _read_document(answer: str) -> list[tuple[str, str]]:
    """Pairs of a town and its hour, or of a note's field and its word."""
    pairs = []
    for part in sentences(answer):
        town, hours = only(part, _TOWNS), numbers(part)
        if town and len(hours) == 1:
            pairs.append((town, NUMBERS[hours[0]]))
            continue
        pairs += [(field, value) for field, read in _FIELDS.items() if (value := read(part))]
        if len(hours) == 1 and "train" not in part:
            pairs.append(("hour", NUMBERS[hours[0]]))
    return pairs


def mark_document(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the words read, and of the lines with all their words."""
    pairs = _read_document(answer)
    if facts["kind"] == "note":
        true = [(field, str(facts[field]).lower()) for field in ("from", "to", "day", "bring")]
        true.append(("hour", NUMBERS[facts["hour"]]))
    else:
        true = [(town.lower(), hour) for town, hour in _rows(facts)]
    # All notes have the names of the fields, so these are not words that were read.
    words = ([word for pair in kind for word in pair if word not in (*_FIELDS, "hour")] for kind in (pairs, true))
    return {"word": overlap(*words), "line": overlap(pairs, true)}


DOCUMENT = Task(
    paint_document,
    grammars(tuple(PHRASES["document"]["questions"]), _document_dense, _document_verbose),
    mark_document,
    share=0.06,
)

# -- caption: one or two sentences on any single picture of the world, with one fixed prompt -----------------

CAPTION_PROMPT = "Caption this picture."  # prompt for captions, also of captioners for drafting with captions
_PAINTERS = {
    "scene": (scene.paint, 5),
    "chart": (chart.paint, 2),
    "receipt": (receipt.paint, 2),
    "line": (line.paint, 1),
    "document": (paint_document, 1),
}


def paint_any(rng: Random) -> Picture:
    """A picture of any kind, scenes most often."""
    kind = rng.choices(list(_PAINTERS), [weight for _, weight in _PAINTERS.values()])[0]
    picture = _PAINTERS[kind][0](rng)
    return Picture(picture.image, {"kind": kind, "of": picture.facts}, picture.labels)


def _parts(kind: str, of: Facts) -> list[str]:
    """Contents of a picture, one phrase each."""
    if kind == "scene":
        return [f"a {thing['size']} {name(thing)}" for thing in of["things"]]
    if kind == "chart":
        return [f"{hue} at {NUMBERS[value]}" for hue, value in zip(of["colours"], of["values"], strict=True)]
    if kind == "receipt":
        return [f"{item} for {NUMBERS[price]}" for item, price in zip(of["goods"], of["prices"], strict=True)]
    if kind == "line":
        return [f"{NUMBERS[value]} on {day}" for day, value in zip(DAYS, of["values"], strict=True)]
    if of["kind"] == "trains":
        return [f"{town} at {hour}" for town, hour in _rows(of)]
    return [f"the day {of['day']}", f"the hour {NUMBERS[of['hour']]}", f"the word {of['bring']}"]


def _title(kind: str, of: Facts) -> str:
    """The picture as a whole, in a phrase."""
    if kind == "scene":
        return f"{NUMBERS[len(of['things'])]} shapes on a {of['background']} background"
    if kind == "chart":
        return f"a bar chart with {NUMBERS[len(of['values'])]} bars"
    if kind == "receipt":
        return f"a receipt of {of['total']} dollars"
    if kind == "line":
        return f"a line chart in {of['colour']}"
    if of["kind"] == "trains":
        return f"a table of {NUMBERS[len(of['towns'])]} trains"
    return f"a note from {of['from']} to {of['to']}"


_KINDS = {
    "scene": r"\bshapes on\b",
    "chart": r"\bbar chart\b",
    "receipt": r"\breceipt\b",
    "line": r"\bline chart\b",
    "document": r"\b(trains|note)\b",
}


def _pairs(answer: str, first: tuple[str, ...], link: str, second: tuple[str, ...]) -> list[Any]:
    return re.findall(rf"\b({'|'.join(first)}) {link} ({'|'.join(second)})\b", answer)


def _content(answer: str, kind: str, of: Facts) -> list[Any]:
    """Contents of a picture of that kind in a caption."""
    answer = answer.lower()
    if kind == "scene":
        return named(answer)
    if kind == "chart":
        return _pairs(answer, tuple(COLOURS), "at", NUMBERS)
    if kind == "receipt":
        return _pairs(answer, GOODS, "for", NUMBERS)
    if kind == "line":
        return _pairs(answer, NUMBERS, "on", _DAYS)
    if of["kind"] == "trains":
        return _pairs(answer, _TOWNS, "at", NUMBERS)
    people = _pairs(answer, _NAMES, "to", _NAMES)
    return [*(people[0] if people else ()), *mentioned(answer, (*_DAYS, *GOODS, *NUMBERS))]


def _true_content(kind: str, of: Facts) -> list[Any]:
    return _content(f"{_title(kind, of)}: {joined(_parts(kind, of))}", kind, of)


def _named_kinds(answer: str) -> list[str]:
    """Kinds of picture that a caption names."""
    return [kind for kind, pattern in _KINDS.items() if re.search(pattern, answer.lower())]


def mark_caption(answer: str, facts: Facts) -> dict[str, float]:
    """Whether the kind of picture is right, and the share of its contents in the caption."""
    content = overlap(_content(answer, **facts), _true_content(**facts))
    return {"kind": float(_named_kinds(answer) == [facts["kind"]]), "content": content}


def _caption(phrase: str, closing: str, rng: Random, facts: Facts) -> str:
    parts = _parts(**facts)
    listed = joined(parts if closing else shuffled(rng, parts))
    return wordings("caption")(rng, phrase, whole=_title(**facts), listed=listed) + closing.format(listed)


CAPTION = Task(
    paint_any,
    grammars((CAPTION_PROMPT,), partial(_caption, "dense", ""), partial(_caption, "full", " In it there are {}.")),
    mark_caption,
    share=0.1,
)

# -- album: captions of five pictures of any kind ------------------------------------------------------------
#
# Drafters are not trained on it. Unlike the fifth caption of a story, an album needs no more than captions of single
# pictures, so a target that can caption those answers it well.

PICTURES = 5


def paint_album(rng: Random) -> Media:
    """Five pictures as of the task `caption`."""
    drawn = [paint_any(rng) for _ in range(PICTURES)]
    return Media({"pictures": [picture.facts for picture in drawn]}, tuple(picture.image for picture in drawn))


def _album_dense(rng: Random, facts: Facts) -> str:
    captions = []
    for number, facts_ in enumerate(facts["pictures"], 1):
        listed = joined(shuffled(rng, _parts(**facts_)))
        words = {"which": f"picture {NUMBERS[number]}", "whole": _title(**facts_), "listed": listed}
        captions.append(wordings("album")(rng, "dense", **words))
    return " ".join(captions)


def _album_verbose(rng: Random, facts: Facts) -> str:
    return " ".join(
        f"This is what we see in picture {NUMBERS[number]}: {_title(**facts_)} with {joined(_parts(**facts_))}."
        for number, facts_ in enumerate(facts["pictures"], 1)
    )


_WHICH = re.compile(rf"\bpicture ({'|'.join(NUMBERS[1 : PICTURES + 1])})\b")


def mark_album(answer: str, facts: Facts) -> dict[str, float]:
    """Shares of the pictures with the right kind, and of their content."""
    kinds, content, pictures = [], [], facts["pictures"]
    for part in sentences(answer):
        which = _WHICH.findall(part)
        if len(which) == 1:
            number, text = NUMBERS.index(which[0]), _WHICH.sub("", part)
            kinds += [(number, kind) for kind in _named_kinds(text)]
            content += [(number, each) for each in _content(text, **pictures[number - 1])]
    true = [(number, each) for number, facts_ in enumerate(pictures, 1) for each in _true_content(**facts_)]
    return {
        "kind": overlap(kinds, [(number, of["kind"]) for number, of in enumerate(pictures, 1)]),
        "content": overlap(content, true),
    }


ALBUM = Task(
    paint_album,
    grammars(tuple(PHRASES["album"]["questions"]), _album_dense, _album_verbose),
    mark_album,
    share=0.0,
    longest=384,
)

# -- report: answers that alternate long certain stretches with stretches of open description ----------------
#
# The form decides a report's head and foot; between them are a text quoted from the question, a numbered list of the
# picture's contents, and remarks in flowing prose. Within a stretch the next word is about as certain as the last.

HEADS, FEET = PHRASES["report_heads"], PHRASES["report_feet"]
"""Form -> first and last sentence, without their full stops."""
REMARKS = 2
Item = dict[str, Any]  # entry of the list: a shape, or a `word` with its `price`


def paint_report(rng: Random) -> Picture:
    """Draw a scene or a receipt, the form of the report, and the words to quote."""
    form, quote = rng.choice(list(HEADS)), rng.sample((*GOODS, *TOWNS, *NAMES, *DAYS), rng.randint(8, 14))
    if rng.random() < 0.5:
        things = scatter(rng, rng.randint(2, 4))
        image, labels, items = render(rng.choice(list(BACKGROUNDS)), things), label(things), things
    else:
        printed = receipt.paint(rng)
        image, labels = printed.image, printed.labels
        lines = zip(printed.facts["goods"], printed.facts["prices"], strict=True)
        items = [{"word": word, "price": price} for word, price in lines]
    return Picture(image, {"form": form, "quote": quote, "items": items}, labels)


def _quoted(facts: Facts) -> str:
    return f'"{", ".join(facts["quote"])}"'


def _line(number: int, item: Item) -> str:
    what = (
        f"{item['word']} for {NUMBERS[item['price']]} {plural('dollar', item['price'])}"
        if "word" in item
        else f"a {item['size']} {name(item)} at the {at(item)}"
    )
    return f"line {NUMBERS[number]}, {what}"


def _remark(rng: Random, item: Item) -> str:
    if "word" not in item:
        return on_shape(rng, item)
    return flowing(rng, clauses(rng, "price", "word", word=item["word"], price=NUMBERS[item["price"]]))


def _plain_remark(item: Item) -> str:
    if "word" not in item:
        return plainly_on_shape(item)
    price = NUMBERS[item["price"]]
    return f"On the receipt there is something to be read, and it is {item['word']}, and its price is {price}."


def _written(facts: Facts, remarks: list[str]) -> str:
    form, lines = facts["form"], "; ".join(_line(number, item) for number, item in enumerate(facts["items"], 1))
    quote = f"The text that goes with it, word by word, is {_quoted(facts)}."
    listed = f"What the picture shows, line by line: {lines}; and that is the end of the list."
    return " ".join([f"{HEADS[form]}.", remarks[0], quote, remarks[1], listed, f"{FEET[form]}."])


_QUOTE = re.compile(r'"([^"]*)"')
_SHAPE_LINE = re.compile(
    rf"line (\w+), an? ({'|'.join(SIZES)}) ({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) at the (\w+) (\w+)"
)
_WORD_LINE = re.compile(rf"line (\w+), ({'|'.join(GOODS)}) for ({'|'.join(NUMBERS)})\b")


def mark_report(answer: str, facts: Facts) -> dict[str, float]:
    """Share of head and foot; shares of the quotation in order, of the list, and of correct remarks."""
    lower, items = answer.lower(), facts["items"]
    ends = [HEADS[facts["form"]], FEET[facts["form"]]]
    quoted = [word for text in _QUOTE.findall(answer) for word in text.split(", ")]
    lines = [*_SHAPE_LINE.findall(lower), *_WORD_LINE.findall(lower)]
    true_lines = [
        line
        for number, item in enumerate(items, 1)
        for line in (_WORD_LINE if "word" in item else _SHAPE_LINE).findall(_line(number, item))
    ]
    text = _QUOTE.sub("", lower)
    remarks: list[Any] = [*read_shapes(text)]
    for part in sentences(text):
        word, price = only(part, GOODS), only(part, NUMBERS)
        remarks += [(word, price)] if word and price else []
    true = {(item["word"], NUMBERS[item["price"]]) if "word" in item else true_shape(item) for item in items}
    return {
        "form": sum(answer.count(end) == 1 for end in ends) / len(ends),
        "quote": in_order(quoted, facts["quote"]),
        "list": overlap(lines, true_lines),
        "remark": len(set(remarks) & true) / max(len(remarks), REMARKS),
    }


REPORT = Task(
    paint_report,
    grammars(
        lambda rng, facts: wordings("report")(rng, "question", form=facts["form"], quote=_quoted(facts)),
        lambda rng, facts: _written(facts, [_remark(rng, item) for item in rng.sample(facts["items"], REMARKS)]),
        lambda rng, facts: _written(facts, [_plain_remark(item) for item in facts["items"][:REMARKS]]),
    ),
    mark_report,
    share=0.0,
    longest=384,
)
