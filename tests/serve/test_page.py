"""The page at ``/``: its files and headers, and the page itself in a headless Chromium.

The tests in the browser are marked ``browser``: ``make test-browser`` runs them, with the extra of that name and a
Chromium (Debian: ``apt-get install chromium``).
"""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from live_server import TINY, Live, live

from checkpoints import vlm
from saccade import load
from saccade.pocket import draw
from saccade.serve.configuration import ModelEntry
from saccade.serve.webpage import HEADERS

STATIC = Path(str(resources.files("saccade.serve") / "static"))
FILES = sorted(file.name for file in STATIC.iterdir())
BROWSER = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"])),
    None,
)
QUIET = [
    f"--{option}"
    for option in (
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "disable-dev-shm-usage",
        "no-first-run",
        "disable-sync",
        "disable-background-networking",
        "disable-component-update",
        "disable-extensions",
    )
]
LONG = 400
"""Tokens of an answer that is stopped: the tiny model's random weights never end one."""
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
    found: list[tuple[str, dict[str, str | None]]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, dict(attrs)))

    Reader().feed((STATIC / "index.html").read_text(encoding="utf-8"))
    for tag, attributes in found:
        assert tag not in ("style", "base", "iframe", "object", "embed")
        assert tag != "script" or attributes.get("src")
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        for name in ("src", "href"):
            assert attributes.get(name) in (None, *FILES)


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


def test_the_page_needs_no_key_and_the_models_do(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("secret\n")
    with live(api_key_file=str(keys)) as server:
        assert server.call("GET", "/")[0] == 200
        assert server.call("GET", "/v1/models")[0] == 401


def test_models_list_lossy_methods(shared: Live) -> None:
    about = shared.client().models.list().data[0].model_dump()["saccade"]
    assert {"chain", "plain"} <= set(about["methods"])
    assert about["lossy"]
    assert not {"off", "chain", "plain", "short"} & set(about["lossy"])


# -- the browser ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pocket() -> Iterator[Live]:
    with live([(ModelEntry("pocket"), load("pocket", method="chain")), (TINY, vlm("qwen", "qwen-draft"))]) as found:
        yield found


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
    """A page in a window of its own; anything on its console is a failure."""

    def __init__(self, chromium: Any, server: Live, **options: Any) -> None:
        self.context = chromium.new_context(**options)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda message: self._console(message))
        self.page.on("pageerror", lambda problem: self.problems.append(str(problem)))
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        self.origin = f"127.0.0.1:{server.port}"
        self.page.goto(f"http://{self.origin}/")

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def ready(self) -> Any:
        self.page.wait_for_selector("#method:enabled")
        return self.page

    def ended(self, turn: int = 1) -> Any:
        """The answers of a turn, at their end."""
        self.page.wait_for_selector(f".turn:nth-child({turn}) .answer", timeout=WAIT)
        self.page.wait_for_selector("#stop", state="hidden", timeout=WAIT)
        return self.page.locator(f".turn:nth-child({turn}) .answer")


@pytest.fixture
def window(chromium: Any, pocket: Live) -> Iterator[Window]:
    found = Window(chromium, pocket, viewport={"width": 1200, "height": 900})
    yield found
    found.context.close()
    assert found.problems == []
    assert found.hosts - {""} == {found.origin}


def give(page: Any, image: Any, tmp_path: Path, event: str) -> None:
    """Drop or paste a picture."""
    file = tmp_path / "chart.png"
    image.save(file)
    content = base64.b64encode(file.read_bytes()).decode()
    page.evaluate(
        """([content, event]) => {
          const bytes = Uint8Array.from(atob(content), (sign) => sign.charCodeAt(0));
          const data = new DataTransfer();
          data.items.add(new File([bytes], "chart.png", { type: "image/png" }));
          const about = { bubbles: true, cancelable: true };
          document.body.dispatchEvent(event === "drop"
            ? new DragEvent("drop", { dataTransfer: data, ...about })
            : new ClipboardEvent("paste", { clipboardData: data, ...about }));
        }""",
        [content, event],
    )
    page.wait_for_selector("#media img")


def shown(answer: Any) -> str:
    return str(answer.locator(".tokens").text_content())


@pytest.mark.browser
@pytest.mark.parametrize("event", ["drop", "paste"])
def test_a_dropped_or_pasted_picture_is_answered_with_marked_tokens(window: Window, tmp_path: Path, event: str) -> None:
    page, sample = window.ready(), draw(5, "chart")
    give(page, sample.image, tmp_path, event)
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
    page.fill("#text", "Again.")
    page.click("#send")
    assert shown(window.ended(2))


@pytest.mark.browser
def test_a_chosen_video_is_answered(window: Window, tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="videos need the video extra")
    path, page = tmp_path / "film.mp4", window.ready()
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for number in range(8):
            frame = av.VideoFrame.from_image(draw(number, "scene").image.resize((32, 32)))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    page.select_option("#model", "tiny")
    page.locator("#settings summary").click()
    page.fill("#length", "9")
    page.set_input_files("#files", str(path))
    page.wait_for_selector("#media video")
    page.fill("#text", "What happens?")
    page.click("#send")
    answer = window.ended()
    expected = vlm("qwen", "qwen-draft").generate("What happens?", videos=[str(path)], max_new_tokens=9)
    assert shown(answer) == expected.text
    assert page.locator(".turn video").count() == 1


@pytest.mark.browser
def test_the_tree_of_a_step_shows_under_the_pointer_and_the_arrow_keys(window: Window) -> None:
    page = window.ready()
    page.click("#sample")
    page.wait_for_selector("#media img")
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
def test_stop_keeps_what_has_arrived_and_frees_the_row(window: Window, pocket: Live) -> None:
    page = window.ready()
    page.select_option("#model", "tiny")
    page.locator("#settings summary").click()
    page.fill("#length", str(LONG))
    page.fill("#text", "Say much.")
    page.click("#send")
    page.wait_for_selector(".answer mark")
    page.keyboard.press("Escape")
    answer = window.ended()
    assert answer.locator(".note").inner_text().endswith("stopped")
    assert 0 < answer.locator("mark").count() < LONG
    pocket.until(lambda: pocket.is_idle)
    page.fill("#text", "Go on.")  # a stopped answer stays in the conversation
    page.click("#send")
    page.wait_for_selector(".turn:nth-child(2) .answer mark")
    page.click("#stop")
    assert window.ended(2).locator(".note").inner_text().endswith("stopped")


@pytest.mark.browser
def test_a_race_gives_the_same_answer_twice_and_the_speed_up(window: Window) -> None:
    page = window.ready()
    page.click("#sample")
    page.wait_for_selector("#media img")
    page.click("#race")
    answers = window.ended()
    assert answers.count() == 2
    plain, fast = answers.nth(0), answers.nth(1)
    assert shown(plain) == shown(fast) != ""
    assert plain.locator("mark.draft").count() == 0 < fast.locator("mark.draft").count()
    verdict = page.locator(".verdict").inner_text()
    assert re.fullmatch(
        r"Both answers are the same, token for token\. chain: \d+\.\d\d× the speed of plain decoding\.",
        verdict,
    )
    assert page.locator("#chart .line").count() == 2
    assert page.locator("#table tbody tr").count() == 2
    page.click("#new")
    assert page.locator(".turn").count() == 0


@pytest.mark.browser
def test_stop_ends_both_answers_of_a_race(window: Window, pocket: Live) -> None:
    page = window.ready()
    page.select_option("#model", "tiny")
    page.locator("#settings summary").click()
    page.fill("#length", str(LONG))
    page.fill("#text", "Say much.")
    page.click("#race")
    page.wait_for_selector(".answer mark")
    page.click("#stop")
    notes = window.ended().locator(".note").all_inner_texts()
    assert [note.rpartition(" ")[2] for note in notes] == ["stopped", "stopped"]
    assert page.locator(".verdict").count() == 0
    pocket.until(lambda: pocket.is_idle)


@pytest.mark.browser
def test_a_server_that_has_gone_is_named_and_the_question_comes_back(chromium: Any) -> None:
    with live() as server:
        window = Window(chromium, server)
        page = window.ready()
    page.fill("#text", "Anyone?")
    page.click("#send")
    assert "The server does not answer" in window.ended().locator(".error").inner_text()
    assert page.locator("#text").input_value() == "Anyone?"
    window.context.close()


@pytest.mark.browser
def test_a_key_is_requested_kept_in_the_tab_alone_and_used(chromium: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("secret\n")
    with live(api_key_file=str(keys)) as server:
        window = Window(chromium, server)
        page = window.page
        page.wait_for_selector("#trouble:not([hidden])")
        assert "API key" in page.locator("#trouble").inner_text()
        page.fill("#key", "secret")
        page.keyboard.press("Tab")
        window.ready()
        assert page.locator("#trouble").is_hidden()
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        page.fill("#length", "5")
        page.fill("#text", "Hello?")
        page.click("#send")
        assert shown(window.ended())
        window.context.close()
        assert [problem for problem in window.problems if "401" not in problem] == []


@pytest.mark.browser
def test_errors_are_shown_as_text_and_the_question_comes_back(window: Window, tmp_path: Path) -> None:
    page = window.ready()
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=400, json={"error": {"message": "<img src=x onerror=alert(1)> is wrong."}}),
    )
    page.fill("#text", "<b>bold</b>")
    page.click("#send")
    answer = window.ended()
    assert answer.locator(".error").inner_text() == "<img src=x onerror=alert(1)> is wrong."
    assert page.locator(".question p").inner_text() == "<b>bold</b>"
    assert page.locator("#text").input_value() == "<b>bold</b>"
    assert page.locator(".turn img, .turn b").count() == 0
    window.problems.clear()  # the 400, which was planted
    file = tmp_path / "notes.txt"
    file.write_text("no picture")
    page.set_input_files("#files", str(file))
    assert "neither a picture nor a video" in page.locator("#trouble").inner_text()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_axe_finds_nothing_and_no_width_scrolls_sideways(chromium: Any, pocket: Live, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs the extra `browser`").Axe()
    phone = {"is_mobile": True, "has_touch": True} if width < 600 else {}
    window = Window(chromium, pocket, viewport={"width": width, "height": 800}, color_scheme=scheme, **phone)
    page = window.ready()

    def check() -> None:
        found = axe.run(page).response["violations"]
        assert [(one["id"], [node["target"] for node in one["nodes"]]) for one in found] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width

    check()
    page.locator("#settings summary").click()
    check()
    sheet = page.locator(".sheet").bounding_box()
    assert 0 <= sheet["x"] <= sheet["x"] + sheet["width"] <= width
    page.click("h1")
    page.click("#sample")
    page.wait_for_selector("#media img")
    page.select_option("#method", "sage")
    check()
    page.click("#race")
    window.ended()
    check()
    page.locator(".answer:last-child .step").nth(5).click()
    page.wait_for_selector("#tree:not([hidden])")
    check()
    window.context.close()
    assert window.problems == []


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
