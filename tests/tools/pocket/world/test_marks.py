"""What no answer gets marks for: saying it again, saying two things at once, saying nothing."""

from statistics import mean

import pytest

from saccade.pocket import WORLD, Sample, draw, score

GRAMMARS = ("dense", "verbose")
SEEDS = range(30)

SAID_IS_SAID = {("caption", "kind"), ("video", "cast"), ("long-video", "cast")}
"""Facts that ask whether something is said, however often: a caption's kind of picture, a video's first list."""


@pytest.fixture(scope="module", params=WORLD)
def drawn(request: pytest.FixtureRequest) -> list[Sample]:
    return [draw(seed, request.param, grammar) for seed in SEEDS for grammar in GRAMMARS]


@pytest.mark.parametrize("times", [2, 3])
def test_a_perfect_answer_said_again_is_worth_no_more_than_its_share(drawn: list[Sample], times: int) -> None:
    for sample in drawn:
        once = score(sample.task, sample.answer, sample.facts)
        again = score(sample.task, " ".join([sample.answer] * times), sample.facts)
        assert set(once.values()) == {1.0}
        for fact, value in again.items():
            if (sample.task, fact) in SAID_IS_SAID:
                assert value == 1.0, "it loses marks now; take it off the list above"
            else:
                # A caption's content may have a word twice by chance: less is lost then.
                assert value <= {2: 0.7, 3: 0.5}[times], (fact, value, sample.answer)


@pytest.mark.parametrize("answer", ["", " ", ".", "Bananas.", "I do not know. I am sorry.", "Yes. No."])
def test_what_says_nothing_of_the_picture_scores_nothing(drawn: list[Sample], answer: str) -> None:
    for sample in drawn:
        assert set(score(sample.task, answer, sample.facts).values()) == {0.0}, (sample.facts, answer)


CHART = {"colours": ["red", "blue"], "values": [3, 5]}
RECEIPT = {"goods": ["tea", "ham"], "prices": [3, 5], "total": 8}
LINE = {"colour": "red", "values": [1, 2, 3, 4, 8]}


@pytest.mark.parametrize("answer", ["Red is four. Red is three. Blue is five.", "Red is three. Red is four."])
def test_a_bar_with_two_values_costs_marks(answer: str) -> None:
    marks = score("chart", answer, CHART)
    assert marks["count"] == 0.0
    assert marks["colour"] < 0.7
    assert marks["value"] < 0.7


@pytest.mark.parametrize("answer", ["Tea costs four. Tea costs three. Ham costs five.", "Tea: three. Tea: four."])
def test_an_item_with_two_prices_costs_marks(answer: str) -> None:
    marks = score("receipt", answer, RECEIPT)
    assert marks["count"] == 0.0
    assert marks["word"] < 0.7
    assert marks["price"] < 0.7


def test_a_day_with_two_values_costs_marks() -> None:
    true = "Monday is one. Tuesday is two. Wednesday is three. Thursday is four. Friday is eight."
    assert score("line", true, LINE)["value"] == 1.0
    assert score("line", f"Monday is two. {true}", LINE)["value"] == pytest.approx(5 / 6)


NOTE = {"kind": "note", "from": "Leo", "to": "Mia", "day": "Friday", "hour": 3, "bring": "ham"}


def test_the_names_of_a_notes_fields_are_not_words_read() -> None:
    guess = "From Ann. To Bob. On Monday. Bring tea. At six."
    assert score("document", guess, NOTE) == {"word": 0.0, "line": 0.0}
    assert score("document", "From Leo. To Bob. On Monday. Bring tea. At six.", NOTE)["word"] == 0.2
    # The words are read, though not what they are: the two names are in each other's place.
    crossed = score("document", "From Mia. To Leo. On Friday. Bring ham. At three.", NOTE)
    assert crossed == {"word": 1.0, "line": pytest.approx(3 / 5)}
    samples = [draw(seed, "document") for seed in range(300)]
    notes = [sample.facts for sample in samples if sample.facts["kind"] == "note"]
    assert mean(score("document", guess, facts)["word"] for facts in notes) < 0.3


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("Yes.", 1.0),
        ("Yes, there is a red ring. A red ring is at the top left.", 1.0),
        ("A red ring is at the top left. Yes, it is.", 1.0),
        ("No.", 0.0),
        ("Yes. No.", 0.0),
        ("No. Yes.", 0.0),
        ("Yes, no.", 0.0),
        ("Yes, there is no red ring.", 0.0),
        ("Yes. Yes.", 0.0),
    ],
)
def test_a_verdict_is_given_once_and_without_its_contrary(answer: str, verdict: float) -> None:
    facts = {"colour": "red", "shape": "ring", "present": True, "reason": []}
    assert score("existence", answer, facts)["verdict"] == verdict


def test_a_no_may_say_what_there_is_no_of() -> None:
    facts = {"colour": "red", "shape": "ring", "present": False, "reason": []}
    for answer, verdict in (("No, there is no red ring.", 1.0), ("No red ring.", 1.0), ("No. No.", 0.0)):
        assert score("existence", answer, facts)["verdict"] == verdict


RING, CROSS = {"colour": "red", "shape": "ring"}, {"colour": "blue", "shape": "cross"}
MOVED = [{"thing": 1, "what": "left"}]
STILL = {
    "kind": "count",
    "about": "red ring",
    "result": "zero",
    "things": [RING, CROSS],
    "events": MOVED,
    "shown": [],
}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("Nothing happens to the red ring.", 1.0),
        ("The blue cross goes left. Nothing happens to the red ring.", 1.0),
        ("Bananas.", 0.0),
        ("The blue cross goes left.", 0.0),
        ("Nothing happens to the blue cross.", 0.0),
        ("Nothing happens to the red ring. The red ring leaves.", 0.5),
        ("Nothing happens to the red ring. Nothing happens to the blue cross.", 0.5),
        ("Nothing happens to the red ring. Nothing happens to the red ring.", 0.5),
    ],
)
def test_where_nothing_happens_to_a_shape_the_reason_says_so(answer: str, reason: float) -> None:
    said = f"{answer} The answer is zero."
    assert score("video-question", said, STILL) == {"result": 1.0, "reason": reason}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("The blue cross goes left.", 1.0),
        ("The blue cross goes left. Nothing happens to the red ring.", 1.0),
        ("The blue cross goes left. Nothing happens to the blue cross.", 0.5),
        ("The blue cross goes left. The blue cross goes left.", 0.5),
    ],
)
def test_a_reason_may_tell_what_else_is_true_once(answer: str, reason: float) -> None:
    facts = {**STILL, "about": "blue cross", "result": "one", "shown": MOVED}
    assert score("video-question", answer, facts)["reason"] == reason


def test_events_beside_the_question_may_be_told_as_often_as_they_happen() -> None:
    twice = [*MOVED, {"thing": 0, "what": "leaves"}, {"thing": 1, "what": "right"}, *MOVED]
    facts = {**STILL, "result": "one", "events": twice, "shown": twice[1:2]}
    told = "The red ring leaves. The blue cross goes left. The blue cross goes left."
    assert score("video-question", told, facts)["reason"] == 1.0
    assert score("video-question", f"{told} The blue cross goes left.", facts)["reason"] == 0.5


def test_one_wrong_value_costs_its_share() -> None:
    facts = {"colours": ["red", "blue", "green"], "values": [3, 5, 1]}
    marks = score("chart", "Red is three. Six for blue. Green comes third at one.", facts)
    assert marks == {"count": 1.0, "colour": 1.0, "value": pytest.approx(2 / 3)}


def test_an_invented_thing_costs_too() -> None:
    facts = {"goods": ["tea", "ham"], "prices": [3, 5], "total": 8}
    marks = score("receipt", "Tea costs three. Ham costs five. Jam costs one. The sum is 8 dollars.", facts)
    assert marks == {"count": 0.0, "word": pytest.approx(2 / 3), "price": pytest.approx(2 / 3), "total": 1.0}
