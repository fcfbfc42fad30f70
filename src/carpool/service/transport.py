"""Transport: Unix and TCP listening sockets, peer credentials, and TLS contexts of server and client."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import stat
import struct
from pathlib import Path
from typing import Any

from carpool.core.errors import InputError
from carpool.service.config import Settings

_CREDENTIALS = struct.Struct("3i")  # process, user and group at the other end
_LONGEST_PATH = 107  # of a Unix socket, in bytes


def peer_uid(sock: Any) -> int | None:
    """The user id at the other end of a Unix socket, as the kernel knows it; None for any other socket."""
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(told)[1])


def listen_unix(path: Path) -> socket.socket:
    """A Unix socket of mode 0600; what a dead daemon left at its place is replaced."""
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise InputError(
            f"socket is {str(path)!r}, {len(os.fsencode(path))} bytes long; the limit is {_LONGEST_PATH}",
            way_out="Name a shorter one with --socket.",
        )
    if path.is_socket():
        if is_answering(path):
            raise InputError(f"a daemon answers at {path} already", way_out="Stop it first, or name another --state.")
        path.unlink()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # never, not for an instant, open to others
    try:
        listening.bind(str(path))
    finally:
        os.umask(before)
    listening.listen(256)
    return listening


def is_answering(path: Path) -> bool:
    """Whether somebody listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trying:
        try:
            trying.connect(str(path))
        except OSError:
            return False
        return True


def listen_tcp(host: str, port: int) -> socket.socket:
    """A TCP socket at a host and port; port 0 takes a free one."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as failing:
            listening = failing.enter_context(socket.socket(family, kind, number))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(256)
            failing.pop_all()
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error}", way_out="Name another --host or --port.") from None
    return listening


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host; a name counts where all its addresses do."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


def server_context(settings: Settings) -> ssl.SSLContext | None:
    """How a daemon proves who it is; None where it has no certificate. InputError where that cannot be used."""
    cert, key = settings.path("tls_cert"), settings.path("tls_key")
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        missing = "tls_cert" if cert is None else "tls_key"
        raise InputError(f"{missing} is not set", way_out="Give the certificate and its key, both as PEM files.")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        if stat.S_IMODE(key.stat().st_mode) & stat.S_IROTH:
            raise InputError("everybody may read this key", where=str(key), way_out=f"chmod o= {key}")
        context.load_cert_chain(cert, key)
    except OSError as error:  # of which those of the library are
        raise InputError(
            f"cannot be used: {error}", where=f"tls_cert {cert}, tls_key {key}", way_out="Name two PEM files that fit."
        ) from None
    return context


def client_context(authority: Path | None) -> ssl.SSLContext:
    """Whom somebody who asks believes: the system's authorities, or only the one in this file."""
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise InputError(f"cannot be used: {error}", where=f"ca {authority}", way_out="Name a PEM file.") from None


def check_encrypted(settings: Settings) -> None:
    """InputError where what is sent from elsewhere could be read on its way, and nobody has said that it may."""
    host = settings["host"]
    if not is_loopback(host) and not settings["tls_cert"] and not settings["insecure_http"]:
        raise InputError(
            f"host is {host!r}, which is reached from elsewhere, and there is no certificate: tokens could be read",
            way_out="Give --tls-cert and --tls-key; or listen on 127.0.0.1 behind a proxy with TLS or ssh -L; or, in a "
            "network that you trust, say --insecure-http.",
        )
