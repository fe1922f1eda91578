"""The page at ``/``: its files and headers, and the page itself in a headless Chromium.

The tests in the browser are marked ``browser``: ``make test-browser`` runs them, with the extra of that name and a
Chromium (Debian: ``apt-get install chromium``).
"""

from __future__ import annotations

import base64
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
BROWSER = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"])), None
)
QUIET = [
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-sync",
]
QUIET += [f"--disable-{part}" for part in ("background-networking", "component-update", "extensions")]
LONG = 400
"""Tokens of an answer that is stopped: the tiny model's random weights never end one."""
DESKTOP = {"width": 1200, "height": 900}
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


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="the browser tests need the extra `browser`")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=QUIET)
        yield browser
        browser.close()


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
        self.page.click("#sample")
        self.page.wait_for_selector("#media img")

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
    return str(answer.locator(".tokens").text_content())


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
    assert re.match(r"Step 2 of \d+: \d+ tokens? drafted, \d+ accepted", first)
    drafted, accepted = map(int, re.findall(r"(\d+) (?:tokens? drafted|accepted)", first))
    assert page.locator("#tree g").count() == drafted + 1
    assert page.locator("#tree g.accepted").count() == accepted
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
    assert re.fullmatch(
        r"Both answers are the same, token for token\. chain: \d+\.\d\d× the speed of plain decoding\.", verdict
    )
    assert page.locator("#chart .line").count() == 2
    assert page.locator("#table tbody tr").count() == 2
    page.click("#new")
    assert page.locator(".turn").count() == 0


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
        page.wait_for_selector("#trouble:not([hidden])")
        assert "API key" in page.locator("#trouble").inner_text()
        page.fill("#key", "second")
        page.keyboard.press("Tab")
        window.ready()
        assert page.locator("#trouble").is_hidden()
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        page.fill("#length", "5")
        window.ask("Hello?")
        assert shown(window.ended())
        window.problems = [problem for problem in window.problems if "401" not in problem]


@pytest.mark.browser
def test_errors_are_shown_as_text_and_the_question_comes_back(window: Window) -> None:
    page = window.ready()
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=400, json={"error": {"message": "<img src=x onerror=alert(1)> is wrong."}}),
    )
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
    assert page.locator("#trouble").inner_text() == " ".join(words for _, words in BAD.values())
    assert in_sight(page, page.locator("#trouble"), above="#text")
    assert [image.get_attribute("alt") for image in page.locator("#media img").all()] == ["good.png", "good.tiff"]


@pytest.mark.browser
def test_an_error_is_in_sight_above_the_composer_and_in_words_of_the_page(either: Window) -> None:
    page, tall = either.ready(), draw(5, "chart").image.resize((400, 600))
    message = "The image in the data: URI has too many pixels; send a smaller one."
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json={"error": {"message": message}}))
    for _ in range(5):
        either.give(tall)
    for turn, key in enumerate(["Enter", "Control+Enter", "Enter"], 1):  # each brings the pictures back
        page.press("#text", key)
        error = either.ended(turn).last.locator(".error")
        assert error.inner_text() == "The image has too many pixels; send a smaller one."
        page.wait_for_selector("#media li:nth-child(5) img")
        assert in_sight(page, error)
    either.problems.clear()  # the 400, which was planted


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
        sheet = page.locator("#sheet").bounding_box()
        assert 0 <= sheet["x"] <= sheet["x"] + sheet["width"] <= width
        page.click("#settings")
        window.give_sample()
        page.select_option("#method", "sage")
        check()
        page.click("#race")
        window.ended()
        check()
        page.locator(".answer:last-child .step").nth(5).click()
        page.wait_for_selector("#tree:not([hidden])")
        check()


@pytest.mark.browser
def test_the_keyboard_alone_is_enough(window: Window) -> None:
    page = window.ready()

    def tab_to(selector: str) -> None:
        for _ in range(30):
            if page.evaluate("(wanted) => document.activeElement.matches(wanted)", selector):
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"{selector} cannot be reached by Tab")

    tab_to("#sample")
    page.keyboard.press("Enter")
    page.wait_for_selector("#media img")
    page.wait_for_function("document.activeElement.id === 'send'")
    page.keyboard.press("Enter")
    window.ended()
    tab_to(".tokens")
    page.keyboard.press("End")
    assert page.locator("#tree").is_visible()
