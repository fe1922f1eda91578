"""The page at ``/``: its files and headers, and the page itself in a headless Chromium.

The tests in the browser are marked ``browser``: ``make test-browser`` runs them, with the extra of that name and a
Chromium (Debian: ``apt-get install chromium``).
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import TINY, Live, live

from checkpoints import vlm
from media_files import encoded, film
from saccade import load
from saccade.pocket import draw
from saccade.serve.app import HEADERS
from saccade.serve.configuration import ModelEntry

STATIC = Path(str(resources.files("saccade.serve") / "static"))
FILES = sorted(file.name for file in STATIC.iterdir())
LONG = 400
"""Tokens of an answer that is stopped: the tiny model's random weights never end one."""
DESKTOP = {"width": 1200, "height": 900}
DRAFTED = r"Drafted (\d+), accepted (\d+): \w+ tokens? for one pass of the large model\."
WAIT = 120_000
"""Milliseconds that an answer may take."""


# -- files and headers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", *FILES])
def test_every_file_has_its_type_and_the_strict_headers(shared: Live, name: str) -> None:
    expected = {
        "": "text/html; charset=utf-8",
        "html": "text/html; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
        "svg": "image/svg+xml",
        "png": "image/png",
    }
    status, headers, body = shared.call("GET", f"/{name}")
    assert status == 200
    assert headers["content-type"] == expected[name.rpartition(".")[2]]
    assert body == (STATIC / (name or "index.html")).read_bytes()
    assert HEADERS.items() <= headers.items()
    tag = {"if-none-match": headers["etag"]}
    assert shared.call("GET", f"/{name}", headers=tag)[0] == 304


def test_the_policy_allows_own_files_alone_and_nothing_inline() -> None:
    policy = dict(part.split(" ", 1) for part in HEADERS["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in HEADERS["content-security-policy"]
    assert "http" not in HEADERS["content-security-policy"]


def test_no_file_refers_to_another_host() -> None:
    known = {"http://www.w3.org/2000/svg"}  # a namespace, never fetched
    for name in FILES:
        if not name.endswith(".png"):
            text = (STATIC / name).read_text(encoding="utf-8")
            assert set(re.findall(r"\bhttps?://[^\s\"'<>)]+", text)) <= known
            assert not re.search(r"[\"'(]//\w", text)


def test_the_document_has_no_inline_script_or_style_and_every_reference_exists() -> None:
    document = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(
        r"<(?:style|base|iframe|object|embed)\b|<script(?![^>]* src=)|<[^>]*\s(?:on\w+|style)=", document
    )
    assert set(re.findall(r'\s(?:src|href)="([^"]*)"', document)) <= {*FILES}


def test_no_script_parses_text_as_html() -> None:
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|localStorage|srcdoc"
    for name in FILES:
        if name.endswith(".js"):
            text = (STATIC / name).read_text(encoding="utf-8")
            assert not re.search(unsafe, text)
            assert set(re.findall(r'from "([^"]+)"', text)) <= {f"./{file}" for file in FILES}


def test_files_beside_the_page_are_not_served(shared: Live) -> None:
    for path in ("/../app.py", "/%2e%2e/app.py", "/..%2fapp.py", "/page.py", "//etc/passwd"):
        assert shared.call("GET", path)[0] == 404


# -- the browser ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pocket() -> Iterator[Live]:
    with live([(ModelEntry("pocket"), load("pocket", method="chain")), (TINY, vlm("qwen", "qwen-draft"))]) as server:
        yield server


class Window:
    """A page in a window of its own."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.problems: list[str] = []

    def console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def ready(self) -> Any:
        self.page.wait_for_selector("#method:enabled")
        return self.page

    def ask(self, text: str, button: str = "#send", length: int | None = None) -> None:
        """Send a question; with a length, to the tiny model, whose random weights never end an answer."""
        if length is not None:
            self.page.select_option("#model", "tiny")
            self.page.click("#settings")
            self.page.fill("#length", str(length))
        self.page.fill("#text", text)
        self.page.click(button)

    def give(self, image: Any, event: str = "drop") -> None:
        """Drop or paste a picture."""
        self.page.evaluate(
            """([content, event]) => {
              const bytes = Uint8Array.from(atob(content), (sign) => sign.charCodeAt(0));
              const data = new DataTransfer();
              data.items.add(new File([bytes], "chart.png", { type: "image/png" }));
              const about = { bubbles: true, cancelable: true };
              document.body.dispatchEvent(event === "drop"
                ? new DragEvent("drop", { dataTransfer: data, ...about })
                : new ClipboardEvent("paste", { clipboardData: data, ...about }));
            }""",
            [base64.b64encode(encoded("PNG", image)).decode(), event],
        )
        self.page.wait_for_selector("#media img")

    def give_sample(self) -> None:
        self.page.click("#gallery button >> nth=0")
        self.page.wait_for_selector("#media img")

    def refuse(self, status: int, message: str, times: int | None = None, **about: Any) -> None:
        """Answer questions with a refusal, always or some times."""
        error, headers = {"message": message, **about}, {"retry-after": "1"}
        answer: Any = {"status": status, "headers": headers, "json": {"error": error}}
        self.page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer), times=times)

    def to_the_end(self) -> None:
        """Show the end of a replay."""
        self.page.locator(".replay input").fill("500")

    def ended(self, turn: int = 1) -> Any:
        """The answers of a turn, at their end."""
        self.page.wait_for_selector(f".turn:nth-child({turn}) .answer", timeout=WAIT)
        self.page.wait_for_selector("#stop", state="hidden", timeout=WAIT)
        return self.page.locator(f".turn:nth-child({turn}) .answer")


@contextmanager
def opened(chromium: Any, server: Live, **options: Any) -> Iterator[Window]:
    """The page in a window; anything on its console is a failure, and so is a request to another host."""
    context = chromium.new_context(**options)
    window, hosts, origin = Window(context.new_page()), set[str](), f"127.0.0.1:{server.port}"
    window.page.on("console", window.console)
    window.page.on("pageerror", lambda problem: window.problems.append(str(problem)))
    window.page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    window.page.goto(f"http://{origin}/")
    yield window
    context.close()
    assert window.problems == []
    assert hosts - {""} == {origin}


@pytest.fixture
def window(chromium: Any, pocket: Live) -> Iterator[Window]:
    with opened(chromium, pocket, viewport=DESKTOP) as window:
        yield window


def shown(answer: Any) -> str:
    return str(answer.locator("> .tokens").text_content())


@pytest.mark.browser
@pytest.mark.parametrize("event", ["drop", "paste"])
def test_a_dropped_or_pasted_picture_is_answered_with_marked_tokens(window: Window, event: str) -> None:
    page, sample = window.ready(), draw(5, "chart")
    window.give(sample.image, event)
    page.fill("#text", sample.question)
    page.keyboard.press("Enter")
    answer = window.ended()
    expected = load("pocket", method="chain").generate(sample.question, images=[sample.image], max_new_tokens=256)
    assert shown(answer) == expected.text
    accepted = expected.stats.accepted_tokens
    assert answer.locator("mark.draft").count() in (accepted, accepted - 1)  # the end token has no text
    assert f"{accepted} drafted and accepted" in answer.locator(".note").inner_text()
    assert page.locator("#media li").count() == 0
    assert page.locator(".turn .question img").count() == 1
    assert expected.text in page.locator("#status").text_content()
    assert page.locator("#chart svg .line.fast").count() == 1
    window.ask("Again.")
    assert shown(window.ended(2))


@pytest.mark.browser
def test_a_chosen_video_is_answered(window: Window, tmp_path: Path) -> None:
    pytest.importorskip("av", reason="videos need the video extra")
    path, page = tmp_path / "film.mp4", window.ready()
    frames = [draw(number, "scene").image.convert("RGB").resize((32, 32)) for number in range(8)]
    path.write_bytes(film([np.asarray(frame) for frame in frames], rate=4))
    page.set_input_files("#files", str(path))
    page.wait_for_selector("#media video")
    window.ask("What happens?", length=9)
    answer = window.ended()
    expected = vlm("qwen", "qwen-draft").generate("What happens?", videos=[str(path)], max_new_tokens=9)
    assert shown(answer) == expected.text
    assert page.locator(".turn video").count() == 1


@pytest.mark.browser
def test_the_tree_of_a_step_shows_under_the_pointer_and_the_arrow_keys(window: Window) -> None:
    page = window.ready()
    window.give_sample()
    page.select_option("#method", "sage")
    page.click("#send")
    answer = window.ended()
    answer.locator(".step").nth(2).hover()
    first = page.locator("#tree p").inner_text()
    parts = re.fullmatch(rf"Step 2 of \d+\. {DRAFTED}", first)
    assert parts
    drafted, accepted = map(int, parts.groups())
    assert page.locator("#tree g:not(.own)").count() == drafted + 1
    assert page.locator("#tree g.accepted").count() == accepted
    assert page.locator("#tree g.own").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("#tree").is_hidden()
    answer.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tree p").inner_text().startswith("Step 3 of")
    assert "Step 3 of" in page.locator("#status").text_content()
    page.keyboard.press("Tab")
    assert page.locator("#tree").is_hidden()


@pytest.mark.browser
@pytest.mark.parametrize(("button", "count"), [("#send", 1), ("#race", 2)])
def test_stop_keeps_what_has_arrived_and_frees_the_rows(window: Window, pocket: Live, button: str, count: int) -> None:
    page = window.ready()
    window.ask("Say much.", button, length=LONG)
    page.wait_for_selector(".answer mark")
    page.keyboard.press("Escape")
    answers = window.ended()
    notes = answers.locator(".note").all_inner_texts()
    assert [note.rpartition(" ")[2] for note in notes] == ["stopped"] * count
    assert 0 < answers.locator("mark").count() < LONG * count
    assert page.locator(".verdict").count() == 0
    pocket.until(lambda: pocket.is_idle)
    window.ask("Go on.")  # a stopped answer stays in the conversation
    page.wait_for_selector(".turn:nth-child(2) .answer mark")
    page.click("#stop")
    assert window.ended(2).locator(".note").inner_text().endswith("stopped")


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize(("tree", "expected"), [("null", "null"), ("{tokens: [1, 2]}", "2")])
def test_a_speed_up_is_claimed_only_where_tokens_were_drafted(tree: str, expected: str) -> None:
    script = (STATIC / "meter.js").read_text() + (
        "const meter = new Meter('auto'); meter.plain = 1;"
        f"for (const at of [0, 500]) meter.add({{tokens: [{{mark: 'target'}}], tree: {tree}}}, at);"
        "console.log(meter.speedUp);"
    )
    command = ["node", "--input-type=module", "-e", script]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == f"{expected}\n"


@pytest.mark.browser
def test_a_race_gives_the_same_answer_twice_and_the_speed_up(window: Window) -> None:
    page = window.ready()
    window.give_sample()
    page.click("#race")
    answers = window.ended()
    assert answers.count() == 2
    plain, fast = answers.nth(0), answers.nth(1)
    assert shown(plain) == shown(fast) != ""
    assert plain.locator("mark.draft").count() == 0 < fast.locator("mark.draft").count()
    verdict = page.locator(".verdict").inner_text()
    same = r"Both answers are the same, token for token\. From the first token to the last: plain \d+\.\d\d s, chain "
    assert re.fullmatch(same + r"\d+\.\d\d s: chain has \d+\.\d\d× the speed of plain decoding\.", verdict)
    assert page.locator("#chart .line").count() == 2
    assert page.locator("#table tbody tr").count() == 2
    page.select_option(".answer:first-child select", "sage")  # the other answer stays
    page.wait_for_selector("#stop", state="hidden", timeout=WAIT)
    page.wait_for_selector(".verdict:text('sage')")
    assert shown(answers.nth(0)) == shown(answers.nth(1))
    assert answers.nth(0).locator("mark.draft").count() > 0
    assert page.locator("#table tbody tr").count() == 3
    page.click("#new")
    assert page.locator(".turn").count() == 0


@pytest.mark.browser
def test_a_replay_unfolds_both_drafts_on_one_clock(window: Window) -> None:
    page = window.ready()
    window.give_sample()
    page.click("#race")
    plain, fast = window.ended().all()
    page.click("[aria-label=Pause]")
    page.wait_for_selector("[aria-label=Play]")
    page.locator(".replay input").fill("0")
    counts, course, texts = page.locator(".count"), page.locator(".course").nth(1), []
    seen = "(part) => getComputedStyle(part).visibility"
    assert plain.locator(".later").first.evaluate(seen) == "visible", "both answers can be read meanwhile"
    box = plain.bounding_box()
    assert page.locator(".replay").bounding_box()["y"] < box["y"] < course.bounding_box()["y"]
    assert box["y"] < page.viewport_size["height"]
    for _ in range(4):
        texts.append(counts.nth(1).inner_text())
        page.click("[aria-label='One pass forward']")
    passes = [int(re.search(r"in (\d+) of", text)[1]) for text in texts]  # type: ignore[index]
    assert passes == sorted({*passes})
    parts = re.fullmatch(DRAFTED, course.locator(".caption").inner_text())
    assert parts
    drafted, accepted = map(int, parts.groups())
    assert course.locator(".stage g:not(.own):not(.root)").count() == drafted
    assert course.locator(".stage g.accepted").count() == accepted
    assert course.locator(".stage .future").count() == 0
    assert parts[0] in page.locator("#status").text_content()
    assert 0 < fast.locator(".later").count() < plain.locator(".later").count()
    page.locator(".replay input").press("ArrowRight")  # inside a pass: drafts, before their verdict
    assert course.locator(".stage svg.open .own:not(.future)").count() == 0
    page.click("[aria-label='One pass back']")
    page.click("[aria-label='One pass back']")
    assert counts.nth(1).inner_text() == texts[-1]
    page.select_option(".replay select", "1")
    page.click("[aria-label=Play]")
    page.wait_for_selector("[aria-label=Play]", timeout=WAIT)
    assert page.locator(".later").count() == 0


@pytest.mark.browser
def test_a_reader_who_wants_no_motion_goes_from_pass_to_pass(chromium: Any, pocket: Live) -> None:
    with opened(chromium, pocket, viewport=DESKTOP, reduced_motion="reduce") as window:
        page = window.ready()
        window.give_sample()
        page.click("#race")
        window.ended()
        assert page.locator("[aria-label=Play], [aria-label=Pause]").is_hidden()
        assert page.locator(".later").count() == 0
        page.click("[aria-label='One pass back']")
        moving = "(part) => getComputedStyle(part).transitionProperty"
        assert page.locator(".stage svg > *").first.evaluate(moving) == "none"


@pytest.mark.browser
def test_a_reload_keeps_the_conversation_and_a_new_chat_forgets_it(window: Window) -> None:
    page, sent = window.ready(), list[Any]()
    window.give_sample()
    page.click("#send")
    first = shown(window.ended())
    window.give(draw(3, "line").image)
    window.ask("What does the line show?", "#race")
    second, verdict = shown(window.ended(2).last), page.locator(".verdict").inner_text()
    page.reload()
    window.ready()
    page.wait_for_selector(".turn:nth-child(2) .replay")
    assert [shown(answer) for answer in page.locator(".answer").all()] == [first, second, second]
    assert page.locator(".verdict").inner_text() == verdict
    assert page.locator("#table tbody tr").count() == 3
    page.locator(".tokens").first.focus()
    page.keyboard.press("End")
    assert page.locator("#tree svg").count() == 1
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    window.ask("Again.")
    window.ended(3)
    messages = sent[0]["messages"]
    assert [message["content"] for message in messages[1::2]] == [first, second]
    assert [len(message["content"]) for message in messages[::2]] == [2, 2, 1]  # pictures are sent again
    page.click("#new")
    page.reload()
    window.ready()
    page.wait_for_selector("#gallery li")
    assert page.locator(".turn").count() == 0


@pytest.mark.browser
def test_an_answer_that_a_reload_cuts_off_is_kept_so_far(window: Window) -> None:
    page = window.ready()
    window.ask("Say much.", length=LONG)
    page.wait_for_selector(".answer mark")
    page.reload()
    note = page.locator(".answer .note")
    note.wait_for()
    assert note.inner_text().endswith("cut off when the page was left")
    assert page.locator(".answer mark").count() > 0


@pytest.mark.browser
def test_the_page_works_without_any_storage(window: Window) -> None:
    page = window.page
    denied = "{ get() { throw new DOMException('no'); } }"
    for name in ("indexedDB", "sessionStorage"):
        page.add_init_script(f"Object.defineProperty(window, '{name}', {denied})")
    page.reload()
    window.ready()
    window.give_sample()
    page.click("#send")
    assert shown(window.ended())


@pytest.mark.browser
def test_a_server_that_has_gone_is_named_and_the_question_comes_back(chromium: Any) -> None:
    with ExitStack() as stack:
        with live() as server:
            window = stack.enter_context(opened(chromium, server))
            page = window.ready()
        window.ask("Anyone?")
        assert "The server does not answer" in window.ended().locator(".error").inner_text()
        assert page.locator("#text").input_value() == "Anyone?"
        window.problems.clear()  # the connection, which is gone


@pytest.mark.browser
def test_a_key_is_requested_kept_in_the_tab_alone_and_used(chromium: Any, keys: str) -> None:
    with live(api_key_file=keys) as server, opened(chromium, server) as window:
        assert server.call("GET", "/v1/models")[0] == 401
        page = window.page
        page.wait_for_selector("#key-problem:not(:empty)")
        assert page.locator("#key-problem").inner_text() == "This server needs an API key; give it."
        page.fill("#key", "third")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-problem:text('does not know')")
        assert page.evaluate("document.activeElement.id") == "key"
        page.fill("#key", "second")
        page.keyboard.press("Tab")
        window.ready()
        assert page.locator("#key-problem").inner_text() == ""
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        stored = page.evaluate("Object.entries({ ...sessionStorage }).flat()")
        assert stored[stored.index("second") - 1] == "saccade-key"
        page.fill("#length", "5")
        window.ask("Hello?")
        assert shown(window.ended())
        window.problems = [problem for problem in window.problems if "401" not in problem]


@pytest.mark.browser
def test_errors_are_shown_as_text_and_the_question_comes_back(window: Window) -> None:
    page = window.ready()
    window.refuse(400, "<img src=x onerror=alert(1)> is wrong.")
    window.ask("<b>bold</b>")
    answer = window.ended()
    assert answer.locator(".error").inner_text() == "<img src=x onerror=alert(1)> is wrong."
    assert page.locator(".question p").inner_text() == "<b>bold</b>"
    assert page.locator("#text").input_value() == "<b>bold</b>"
    assert page.locator(".turn img, .turn b").count() == 0
    window.problems.clear()  # the 400, which was planted


PHONE = {"viewport": {"width": 390, "height": 700}, "is_mobile": True, "has_touch": True}


@pytest.fixture(params=["phone", "desktop"])
def either(request: Any, chromium: Any, pocket: Live) -> Iterator[Window]:
    """A window of a phone's size, and one of a desktop's."""
    options = PHONE if request.param == "phone" else {"viewport": DESKTOP}
    with opened(chromium, pocket, **options) as window:
        yield window


def in_sight(page: Any, element: Any, above: str = "#ask") -> bool:
    """Whether an element is within the window, and not behind the composer."""
    box, composer = element.bounding_box(), page.locator(above).bounding_box()
    return bool(box and box["y"] >= 0 and box["y"] + box["height"] <= composer["y"])


BAD = {
    "notes.txt": (b"no picture", "notes.txt is neither a picture nor a video; choose another file."),
    "cut.png": (b"\x89PNG\r\n\x1a\n", "cut.png is damaged or no picture; choose another file."),
    "icon.svg": (b"<svg/>", "icon.svg is no PNG, JPEG, WebP, GIF, BMP or TIFF; save it as one of them."),
    "film.mp4": (b"#EXTM3U\nhttp://x", "film.mp4 is no video that can be read; choose another file."),
}


@pytest.mark.browser
def test_bad_files_are_named_when_they_are_chosen_and_good_ones_are_kept(either: Window, tmp_path: Path) -> None:
    page = either.ready()
    draw(5, "chart").image.save(tmp_path / "good.tiff")
    draw(5, "chart").image.save(tmp_path / "good.png")
    for name, (content, _) in BAD.items():
        (tmp_path / name).write_bytes(content)
    page.set_input_files("#files", [str(tmp_path / name) for name in (*BAD, "good.png", "good.tiff")])
    page.wait_for_selector("#trouble:not([hidden])")
    assert page.locator("#trouble").inner_text() == "\n".join(words for _, words in BAD.values())
    assert in_sight(page, page.locator("#trouble"), above="#text")
    assert [image.get_attribute("alt") for image in page.locator("#media img").all()] == ["good.png", "good.tiff"]


@pytest.mark.browser
def test_an_error_of_the_server_is_in_sight_above_the_composer(either: Window) -> None:
    page, tall = either.ready(), draw(5, "chart").image.resize((400, 600))
    either.refuse(500, "Broken.")
    for _ in range(5):
        either.give(tall)
    for key in ("Enter", "Control+Enter", "Enter"):  # each brings the pictures back, and drops the turn that failed
        with page.expect_response("**/v1/chat/completions"):
            page.press("#text", key)
        error = either.ended().last.locator(".error")
        assert error.inner_text() == "Broken."
        page.wait_for_selector("#media li:nth-child(5) img")
        assert in_sight(page, error)
    either.problems.clear()  # the 500, which was planted


REFUSED: dict[str, tuple[int, str, dict[str, str], str]] = {
    "The picture has more than 20 MB; give a smaller file.": (
        *(400, "The image in the data: URI has more than 20,971,520 bytes; give a smaller file.", {}, "trouble"),
    ),
    "The conversation with its pictures is larger than 32 MiB, the most that this server takes; send smaller pictures, "
    "or start a new chat.": (413, "The body is larger than 32 MiB; send smaller media.", {}, "trouble"),
    "The model has room for 68 tokens of an answer here; give that or less.": (
        *(400, "The sequence needs 700 tokens but this model's context is 512; shorten the prompt."),
        *({"param": "messages", "code": "context_length_exceeded"}, "length-problem"),
    ),
    "This server answers with at most 200 tokens; give that or less.": (
        *(400, "This server answers with at most 200 tokens; lower max_tokens.", {"param": "max_tokens"}),
        "length-problem",
    ),
    "This server needs an API key; give it.": (401, "The API key is missing or wrong.", {}, "key-problem"),
    "There is no method 'x' here.": (
        *(400, "There is no method 'x' here.", {"param": "speculation.method"}, "method-problem"),
    ),
}
"""Sentence on the page -> the server's status, sentence and fields, and the place on the page."""


@pytest.mark.browser
@pytest.mark.parametrize("words", REFUSED)
def test_a_refusal_is_said_where_its_cause_is_in_words_of_the_page(either: Window, words: str) -> None:
    page = either.ready()
    status, message, about, place = REFUSED[words]
    either.give_sample()
    either.refuse(status, message, **about)
    page.click("#send")
    problem = page.locator(f"#{place}")
    page.wait_for_selector(f"#{place}:not(:empty)")
    assert problem.inner_text() == words
    assert in_sight(page, problem, above="#text")
    assert page.evaluate("document.activeElement.id") == place.removesuffix("-problem").replace("trouble", "text")
    assert page.locator("#text").input_value() == "Read the values from the bar chart."
    assert page.locator("#media img").count() == 1
    assert page.locator(".turn").count() == 0
    page.unroute("**/v1/chat/completions")
    page.click("#send")
    assert shown(either.ended())
    either.problems.clear()  # the refusal, which was planted


@pytest.mark.browser
def test_a_picture_that_the_server_cannot_read_is_named_at_the_composer(window: Window, tmp_path: Path) -> None:
    path, page = tmp_path / "scan.tiff", window.ready()
    path.write_bytes(b"no picture")  # a format that browsers cannot check
    page.set_input_files("#files", str(path))
    page.wait_for_selector("#media img")
    page.click("#send")
    page.wait_for_selector("#trouble:not(:empty)", timeout=WAIT)
    begin = "The picture is damaged, or not a picture in an accepted format; give one of PNG, "
    assert page.locator("#trouble").inner_text().startswith(begin)
    window.problems.clear()  # the refusal


@pytest.mark.browser
def test_an_adapter_says_whose_drafters_it_has(chromium: Any) -> None:
    with live() as server, opened(chromium, server) as window:
        about, page = json.loads(server.call("GET", "/v1/models")[2]), window.page
        about["data"].append({**about["data"][0], "id": "red", "parent": "tiny"})
        page.route("**/v1/models", lambda route: route.fulfill(json=about))
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.wait_for_selector("#method:not([disabled])")
        assert not page.is_visible("#caveat")
        page.select_option("#model", "red")
        assert "An adapter of tiny" in page.inner_text("#caveat")


def test_files_that_the_model_or_the_server_does_not_take_are_refused_when_chosen(chromium: Any) -> None:
    with live(max_body_mib=1) as server, opened(chromium, server) as window:
        about, page = json.loads(server.call("GET", "/v1/models")[2]), window.page
        extension = about["data"][0]["saccade"]
        assert (extension["media"], extension["max_body_mib"]) == (["image", "video"], 1)
        extension["media"] = ["image"]
        page.route("**/v1/models", lambda route: route.fulfill(json=about))
        page.reload()
        window.ready()
        clip = {"name": "film.mp4", "mimeType": "video/mp4", "buffer": b"....ftyp"}
        page.set_input_files("#files", [clip, {"name": "large.png", "mimeType": "image/png", "buffer": bytes(2**20)}])
        page.wait_for_selector("#trouble:not(:empty)")
        assert page.locator("#trouble").inner_text() == (
            "film.mp4 is a video, which this model does not take; choose a picture of it.\n"
            "large.png has 2 MB, and all files of a question may have 0 MB; choose a smaller one."
        )


@pytest.mark.browser
def test_a_busy_server_is_asked_again(window: Window) -> None:
    page = window.ready()
    window.refuse(503, "The server is overloaded.", times=1, code="overloaded")
    window.give_sample()
    page.click("#send")
    page.wait_for_selector(".note:text('The server is busy; it is asked again in 1 s.')")
    assert shown(window.ended())
    window.refuse(429, "This API key exceeds 1 request per minute.")
    window.ask("Again.")
    page.wait_for_selector(".note:text('more questions than the server takes')")
    page.click("#stop")
    page.wait_for_selector("#send")
    assert page.locator("#text").input_value() == "Again."
    window.problems.clear()  # the refusals, which were planted


@pytest.mark.browser
def test_reasoning_is_folded_and_tool_calls_are_code(window: Window) -> None:
    marked = {"tokens": [{"id": 1, "text": "Let me ", "mark": "target"}], "tree": None}
    calls = [{"name": "look_up", "arguments": '{"town": '}, {"arguments": '"Oslo"}'}]
    deltas = [{"reasoning_content": "Let me "}, {"reasoning_content": "think."}, {"content": "Yes."}]
    deltas += [{"tool_calls": [{"index": 0, "function": call}]} for call in calls]
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": delta}]} for delta in deltas]
    chunks[0]["saccade"] = marked
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    window.ready().route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    window.ask("Is it cold in Oslo?")
    answer = window.ended()
    assert shown(answer) == "Yes."
    assert answer.locator("details[open]").count() == 0
    assert answer.locator("details .tokens").text_content() == "Let me think."
    assert answer.locator("pre").inner_text() == 'look_up({"town": "Oslo"})'


@pytest.mark.browser
def test_pictures_of_the_gallery_are_small_and_come_with_their_questions(window: Window) -> None:
    page = window.ready()
    buttons = page.locator("#gallery button").all()
    for button in buttons:  # one takes the place of the other
        button.click()
        page.wait_for_selector(f"#media img[alt='{button.locator('b').inner_text()}']")
        assert page.locator("#text").input_value() == button.locator("span span").inner_text()
    page.fill("#text", "My own question")
    buttons[0].click()
    page.wait_for_selector("#media img[alt='Bar chart']")
    assert page.locator("#text").input_value() == "My own question"
    assert page.locator("#media img").count() == 1
    assert all(len((STATIC / name).read_bytes()) < 15_000 for name in FILES if name.startswith("gallery"))


@pytest.mark.browser
def test_numbers_that_cannot_be_used_are_named_at_their_fields_and_not_sent(either: Window) -> None:
    page, sent = either.ready(), []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    page.click("#settings")
    for field, wrong, words in (
        ("length", ["0", "1.5", "99999999", ""], r"Give a whole number from 1 to \d+\."),
        ("temperature", ["-1", "6", ""], r"Give a number from 0 to 5\."),
    ):
        right = page.input_value(f"#{field}")
        for value in wrong:
            page.fill(f"#{field}", value)
            assert re.fullmatch(words, page.locator(f"#{field}-problem").inner_text())
        page.click("#settings")
        either.ask("Hello?")
        assert page.locator("#sheet").is_visible()
        assert page.evaluate("document.activeElement.id") == field
        page.fill(f"#{field}", right)
        assert page.locator(f"#{field}-problem").inner_text() == ""
    assert sent == []
    page.fill("#temperature", "0.75")
    page.click("#send")
    assert shown(either.ended())
    assert len(sent) == 1


@pytest.mark.browser
def test_settings_move_the_chat_down_and_cover_nothing(either: Window) -> None:
    page = either.ready()
    page.click("#settings")
    sheet, below = page.locator("#sheet").bounding_box(), page.locator("#welcome").bounding_box()
    assert sheet["y"] + sheet["height"] <= below["y"]
    page.keyboard.press("Escape")
    assert page.locator("#sheet").is_hidden()
    assert page.evaluate("document.activeElement.id") == "settings"


@pytest.mark.browser
def test_an_answer_stays_in_sight_and_a_phone_folds_the_speed(either: Window) -> None:
    page = either.ready()
    for turn in range(1, 4):
        either.ask("Tell me a story.")
        assert in_sight(page, either.ended(turn).locator(".note"))
    is_phone = page.evaluate("innerWidth") < 600
    assert page.locator("#chart").is_visible() is not is_phone
    assert "tokens per second" in page.locator("#latest").text_content()
    assert page.locator("#latest").is_visible() is is_phone
    page.locator("#speed summary").click()
    assert page.locator("#chart").is_visible() is is_phone


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_axe_finds_nothing_and_no_width_scrolls_sideways(chromium: Any, pocket: Live, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs the extra `browser`").Axe()
    phone = {"is_mobile": True, "has_touch": True} if width < 600 else {}
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme, **phone}
    with opened(chromium, pocket, **options) as window:
        page = window.ready()

        def check() -> None:
            violations = axe.run(page).response["violations"]
            assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in violations] == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width

        check()
        page.click("#settings")
        check()
        if phone:
            for control in page.locator("button, select, #sheet input").all():
                assert not (box := control.bounding_box()) or min(box["width"], box["height"]) >= 44
        sheet = page.locator("#sheet").bounding_box()
        assert 0 <= sheet["x"] <= sheet["x"] + sheet["width"] <= width
        page.click("#settings")
        window.give_sample()
        page.select_option("#method", "sage")
        check()
        page.click("#race")
        window.ended()
        page.click("[aria-label=Pause]")
        check()
        window.to_the_end()
        page.locator(".answer:last-child .step").nth(5).click()
        page.wait_for_selector("#tree:not([hidden])")
        check()
        for status, place in ((413, "#trouble"), (401, "#key-problem"), (500, ".answer .error")):
            window.refuse(status, "The server failed.")
            window.ask("Why?")
            page.wait_for_selector(f"{place}:not(:empty)")
            page.wait_for_selector("#send")
            check()
        window.problems.clear()  # the refusals, which were planted


@pytest.mark.browser
def test_the_keyboard_alone_is_enough(window: Window) -> None:
    page = window.ready()

    def tab_to(selector: str) -> None:
        for _ in range(30):
            if page.evaluate("(wanted) => document.activeElement.matches(wanted)", selector):
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"{selector} cannot be reached by Tab")

    tab_to("#gallery button")
    page.keyboard.press("Enter")
    page.wait_for_selector("#media img")
    page.wait_for_function("document.activeElement.id === 'send'")
    page.keyboard.press("Enter")
    window.ended()
    tab_to(".tokens")
    page.keyboard.press("End")
    assert page.locator("#tree").is_visible()
