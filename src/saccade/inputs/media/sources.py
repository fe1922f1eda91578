"""Downloads of images and videos from web addresses, within limits."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from saccade.errors import InputError
from saccade.options import MediaLimits

_PORTS = {"http": 80, "https": 443}
_TUNNELS = tuple(
    ipaddress.IPv6Network(network)
    for network in ("::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16", "fec0::/10")
)
"""IPv6 networks whose addresses contain or hide another one: compatible, NAT64, Teredo, 6to4, site-local."""


class _Address(NamedTuple):
    """One parsed address, used for the check and for the request."""

    scheme: str
    host: str
    port: int
    target: str


def fetch(url: str, what: str, limits: MediaLimits, most: int) -> bytes:
    """Download a file from one listed host: one resolved public address, no redirect, bounded.

    The host is resolved once, every one of its addresses must be public, and the connection goes to one of these.
    Proxies of the environment are not used, because they would resolve the host again.
    """
    address = _parse(url, what)
    if not any(_is_listed(address, entry) for entry in limits.domains):
        raise InputError(
            f"The host of the {what}'s address is not one of those that are fetched; send its content as a data: URI."
        )
    deadline = time.monotonic() + limits.fetch_seconds
    late = InputError(
        f"The {what}'s address took longer than {limits.fetch_seconds:g} seconds; send its content as a data: URI."
    )
    ips = _resolve(address, deadline)
    if ips is None:
        raise late
    if not ips:
        raise InputError(f"The host of the {what}'s address cannot be found; check the address.")
    if not limits.private_addresses and not all(is_public(ip) for ip in ips):
        raise InputError(
            f"The host of the {what}'s address is not in the public network; send its content as a data: URI."
        )
    try:
        return _download(address, ips, what, most, deadline)
    except InputError:
        raise
    except (OSError, http.client.HTTPException, ValueError):
        if time.monotonic() >= deadline:
            raise late from None
        raise InputError(f"The {what}'s address cannot be read; check it, or send it as a data: URI.") from None


def is_public(ip: str) -> bool:
    """Whether an IP address is a unicast address of the public internet and no other one in disguise."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:  # with a zone, which only link-local addresses have
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(str(address.ipv4_mapped))
        if any(address in network for network in _TUNNELS):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def _parse(url: str, what: str) -> _Address:
    malformed = InputError(f"The {what}'s address is malformed; give https://host/path in ASCII without user name.")
    if not url.isascii() or not url.isprintable() or any(sign in url for sign in ' \\"<>^`{|}'):
        raise malformed
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise malformed from None
    host = (parts.hostname or "").removesuffix(".")
    scheme = parts.scheme.lower()
    if scheme not in _PORTS or not host or "@" in parts.netloc or "%" in host or port == 0:
        raise malformed
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Address(scheme, host, port or _PORTS[scheme], target)


def _is_listed(address: _Address, entry: str) -> bool:
    name, _, port = entry.lower().partition(":")
    if address.port != (int(port) if port else _PORTS[address.scheme]):
        return False
    inside = name.startswith(".") and (address.host.endswith(name) or address.host == name[1:])
    return inside or name in ("*", address.host)


def _resolve(address: _Address, deadline: float) -> list[str] | None:
    """IP addresses of the host; None when the resolver, which has no limit of its own, took too long."""
    ips: list[str] = []

    def look_up() -> None:
        with suppress(OSError, UnicodeError):
            entries = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            ips.extend(str(entry[4][0]) for entry in entries)

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    return None if thread.is_alive() else ips


def _download(address: _Address, ips: list[str], what: str, most: int, deadline: float) -> bytes:
    raw = _connect(ips, address.port, deadline)
    # The socket's own timeout starts again with every byte; this ends a dripping answer, too. TLS takes over the
    # socket, so its end is reached through a second descriptor.
    second = raw.dup()
    watchdog = threading.Timer(max(0.0, deadline - time.monotonic()), _shut, [second])
    watchdog.daemon = True
    watchdog.start()
    connection = http.client.HTTPConnection(address.host, address.port)
    try:
        if address.scheme == "https":
            raw = ssl.create_default_context().wrap_socket(raw, server_hostname=address.host)
        connection.sock = raw
        connection.request("GET", address.target, headers={"Accept-Encoding": "identity", "User-Agent": "saccade"})
        response = connection.getresponse()
        if 300 <= response.status < 400:
            raise InputError(
                f"The {what}'s address redirects, which is not followed; give the address of the file itself."
            )
        if response.status != 200:
            raise InputError(f"The {what}'s address answers with status {response.status}; check the address.")
        content = bytearray()
        is_larger = (response.length or 0) > most
        while not is_larger and (part := response.read(1 << 16)):
            content += part
            is_larger = len(content) > most
        if is_larger:
            raise InputError(f"The {what} at the address has more than {most:,} bytes; give a smaller file.")
        if time.monotonic() >= deadline or response.length:
            raise OSError("cut off")
        return bytes(content)
    finally:
        watchdog.cancel()
        for opened in (connection, raw, second):
            opened.close()


def _connect(ips: list[str], port: int, deadline: float) -> socket.socket:
    failure: OSError = OSError("no address")
    for ip in ips:
        try:
            return socket.create_connection((ip, port), timeout=max(0.01, deadline - time.monotonic()))
        except OSError as error:
            failure = error
    raise failure


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
