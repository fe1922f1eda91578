"""Media from web addresses: listed hosts, public addresses, no redirect, and bounds that hold while streaming."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from media_files import encoded
from saccade.errors import InputError
from saccade.inputs.media import SERVER, MediaLimits, load_image
from saccade.inputs.media.sources import is_public

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8))
PNG = encoded("PNG", PICTURE)
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(PNG) + PNG


class Site:
    """A server of one answer, which keeps the requests."""

    def __init__(self, answer: bytes | Callable[[socket.socket], None]) -> None:
        self._answer = answer
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    self.requests.append(connection.recv(65536))
                    if callable(self._answer):
                        self._answer(connection)
                    else:
                        connection.sendall(self._answer)

    @property
    def limits(self) -> MediaLimits:
        return replace(SERVER, domains=(f"127.0.0.1:{self.port}",), private_addresses=True, fetch_seconds=5.0)

    def url(self, path: str = "/a.png") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def site() -> Iterator[Callable[[Any], Site]]:
    opened: list[Site] = []

    def open_site(answer: bytes | Callable[[socket.socket], None]) -> Site:
        opened.append(Site(answer))
        return opened[-1]

    yield open_site
    for one in opened:
        one.close()


def refused(url: str, says: str, limits: MediaLimits) -> None:
    with pytest.raises(InputError, match=r"^The [^\n]*\.$") as error:
        load_image(url, limits)
    assert says in str(error.value)


def test_a_listed_host_is_fetched_with_its_name_and_without_a_proxy(
    site: Callable[[Any], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    here = site(OK)
    image = load_image(here.url("/a%20b.png?q=1&r"), here.limits)
    assert np.array_equal(np.asarray(image), np.asarray(PICTURE))
    assert here.requests[0].startswith(b"GET /a%20b.png?q=1&r HTTP/1.1\r\n")
    assert f"Host: 127.0.0.1:{here.port}\r\n".encode() in here.requests[0]
    refused(here.url(), "not in the public network", replace(here.limits, private_addresses=False))
    refused(here.url(), "not one of those that are fetched", replace(here.limits, domains=("example.com",)))
    refused(here.url(), "none is fetched here", replace(here.limits, domains=()))
    assert len(here.requests) == 1


def test_a_redirect_is_not_followed(site: Callable[[Any], Site]) -> None:
    secret = site(OK)
    for status in (301, 302, 303, 307, 308):
        here = site(f"HTTP/1.1 {status} Moved\r\nLocation: {secret.url()}\r\nContent-Length: 0\r\n\r\n".encode())
        refused(here.url(), "redirects, which is not followed", here.limits)
    assert not secret.requests


def test_errors_of_the_host_are_not_repeated(site: Callable[[Any], Site]) -> None:
    here = site(b"HTTP/1.1 404 internal <b>detail</b>\r\nContent-Length: 3\r\n\r\nabc")
    refused(here.url(), "answers with status 404; check the address", here.limits)
    for answer in (b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200, OK[:-10]):
        here = site(answer)
        refused(here.url(), "cannot be read; check it", here.limits)


@pytest.mark.parametrize("declared", [True, False])
def test_a_large_answer_is_cut_while_it_streams(site: Callable[[Any], Site], declared: bool) -> None:
    sent = 0

    def endless(connection: socket.socket) -> None:
        nonlocal sent
        length = b"Content-Length: 1000000000\r\n" if declared else b""
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n")
        while sent < 50_000_000:
            sent += connection.send(bytes(100_000))

    here = site(endless)
    refused(here.url(), "more than 300,000 bytes", replace(here.limits, image_bytes=300_000))
    time.sleep(0.1)
    assert sent < 20_000_000


@pytest.mark.parametrize("place", ["head", "body", "before"])
def test_a_dripping_answer_ends_at_the_limit(site: Callable[[Any], Site], place: str) -> None:
    def drip(connection: socket.socket) -> None:
        if place == "before":
            time.sleep(20)
        if place == "body":
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        for _ in range(200):
            connection.sendall(b"H" if place == "head" else b"x")
            time.sleep(0.1)

    here, start = site(drip), time.monotonic()
    refused(here.url(), "took longer than 1 seconds", replace(here.limits, fetch_seconds=1.0))
    assert time.monotonic() - start < 5


def test_a_resolver_that_hangs_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(5) or [])
    limits = replace(SERVER, domains=("example.com",), fetch_seconds=0.3)
    refused("http://example.com/a.png", "took longer than 0.3 seconds", limits)


PRIVATE = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "192.0.0.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1",
    "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "fec0::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::a00:1", "2002:7f00:1::", "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:db8::1", "100::1",
]  # fmt: skip


@pytest.mark.parametrize("ip", PRIVATE)
def test_addresses_that_are_not_public_are_never_connected_to(ip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_public(ip)
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("connected"))
    for others in ([], ["8.8.8.8"]):
        answer = [(0, 0, 0, "", (one, 80)) for one in [*others, ip]]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, answer=answer, **__: answer)
        refused("http://example.com/a.png", "not in the public network", replace(SERVER, domains=("*",)))


@pytest.mark.parametrize("ip", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses_are_known_as_such(ip: str) -> None:
    assert is_public(ip)


@pytest.mark.parametrize("host", ["localhost", "127.1", "2130706433", "0x7f000001", "017700000001", "[::1]", "0"])
def test_other_spellings_of_this_machine_are_found_out(host: str, site: Callable[[Any], Site]) -> None:
    here = site(OK)
    limits = replace(SERVER, domains=("*", f"*:{here.port}"))
    with pytest.raises(InputError, match=r"not in the public network|cannot be found"):
        load_image(f"http://{host}:{here.port}/a.png", limits)
    assert not here.requests


def test_the_host_is_resolved_once_and_that_address_is_used(
    site: Callable[[Any], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that answers the check with a public address and the connection with a private one."""
    here, lookups, connected = site(OK), [], []

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        lookups.append(host)
        ip = "8.8.8.8" if len(lookups) == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (ip, port))]

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        connected.append(address[0])
        one = socket.socket()
        one.settimeout(timeout)
        one.connect(("127.0.0.1", address[1]))
        return one

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "create_connection", connect)
    limits = replace(SERVER, domains=(f"pictures.example:{here.port}",))
    assert load_image(f"http://pictures.example:{here.port}/a.png", limits).size == PICTURE.size
    assert lookups == ["pictures.example"]
    assert connected == ["8.8.8.8"]
    assert f"Host: pictures.example:{here.port}\r\n".encode() in here.requests[0]


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com@127.0.0.1/a",
        "http://user:word@example.com/a",
        "http://example.com\\@127.0.0.1/a",
        "http://example.com/a\r\nX: y",
        "http://example.com/a b",
        "http://example.com\t/a",
        "http://ex\u00e4mple.com/a",
        "http://\uff45xample.com/a",
        "http://example\u3002com/a",
        "http://example.com:0/a",
        "http://example.com:99999/a",
        "http://example.com:8o/a",
        "http:///a",
        "http://[::1/a",
        "http://example.com%2eevil/a",
    ],
)
def test_addresses_that_two_parsers_could_read_differently_are_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("resolved"))
    refused(url, "is malformed", replace(SERVER, domains=("*", "example.com")))


@pytest.mark.parametrize(
    ("domain", "url", "listed"),
    [
        ("example.com", "https://example.com/", True),
        ("example.com", "https://EXAMPLE.com./", True),
        ("example.com", "https://a.example.com/", False),
        ("example.com", "https://example.com.evil.org/", False),
        ("example.com", "https://evilexample.com/", False),
        ("example.com", "https://example.com:8443/", False),
        ("example.com", "http://example.com:443/", False),
        ("example.com:8443", "https://example.com:8443/", True),
        (".example.com", "https://a.b.example.com/", True),
        (".example.com", "https://example.com/", True),
        (".example.com", "https://evilexample.com/", False),
        ("*", "https://anything.org/", True),
        ("*", "https://anything.org:22/", False),
    ],
)
def test_domains_are_matched_as_a_whole(domain: str, url: str, listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [])
    says = "cannot be found" if listed else "not one of those that are fetched"
    refused(url, says, replace(SERVER, domains=(domain,)))


def test_tls_checks_the_name_and_is_bound_by_the_limit(site: Callable[[Any], Site]) -> None:
    def silent(connection: socket.socket) -> None:
        time.sleep(20)

    for answer, says in ((OK, "cannot be read"), (silent, "took longer than 1 seconds")):
        here, start = site(answer), time.monotonic()
        refused(here.url().replace("http", "https"), says, replace(here.limits, fetch_seconds=1.0))
        assert time.monotonic() - start < 5


def test_tls_is_opened_for_the_name_of_the_address(
    site: Callable[[Any], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, names = site(OK), []
    context = ssl.create_default_context()
    assert context.check_hostname
    assert context.verify_mode == ssl.CERT_REQUIRED

    class Recorder:
        def wrap_socket(self, plain: socket.socket, server_hostname: str) -> socket.socket:
            names.append(server_hostname)
            return plain

    monkeypatch.setattr(ssl, "create_default_context", Recorder)
    assert load_image(here.url().replace("http", "https"), here.limits).size == PICTURE.size
    assert names == ["127.0.0.1"]
