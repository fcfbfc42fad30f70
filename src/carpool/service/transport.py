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

_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid of the peer
_MAX_SOCKET_PATH = 107  # bytes, a limit of the kernel


def peer_uid(sock: Any) -> int | None:
    """Return the user id of a Unix socket's peer (SO_PEERCRED); None for any other socket."""
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def listen_unix(path: Path) -> socket.socket:
    """Listen on a Unix socket of mode 0600; a socket left by a dead daemon is replaced."""
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise InputError(
            f"socket path {str(path)!r} has {len(os.fsencode(path))} bytes; the limit is {_MAX_SOCKET_PATH}",
            way_out="Set a shorter path with --socket.",
        )
    if path.is_socket():
        if is_answering(path):
            raise InputError(f"a daemon is already listening on {path}", way_out="Stop it, or use another --state.")
        path.unlink()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # a chmod after bind would leave the socket open to others for a moment
    try:
        listening.bind(str(path))
    finally:
        os.umask(before)
    listening.listen(256)
    return listening


def is_answering(path: Path) -> bool:
    """Whether a process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def listen_tcp(host: str, port: int) -> socket.socket:
    """Listen on a TCP host and port; port 0 takes a free one."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as on_error:
            listening = on_error.enter_context(socket.socket(family, kind, number))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(256)
            on_error.pop_all()
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error}", way_out="Use another --host or --port.") from None
    return listening


def is_loopback(host: str) -> bool:
    """Whether all addresses of a host are loopback addresses."""
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(addresses) and all(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in addresses)


def server_context(settings: Settings) -> ssl.SSLContext | None:
    """Return the server's TLS context; None without a certificate, InputError when certificate or key is unusable."""
    cert, key = settings.path("tls_cert"), settings.path("tls_key")
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        missing = "tls_cert" if cert is None else "tls_key"
        raise InputError(f"{missing} is not set", way_out="Set tls_cert and tls_key, both PEM files.")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        if stat.S_IMODE(key.stat().st_mode) & stat.S_IROTH:
            raise InputError("private key is readable by all users", where=str(key), way_out=f"Run: chmod o= {key}")
        context.load_cert_chain(cert, key)
    except OSError as error:  # ssl.SSLError is one
        raise InputError(
            f"cannot load: {error}",
            where=f"tls_cert {cert}, tls_key {key}",
            way_out="Use a certificate and its matching key, both PEM files.",
        ) from None
    return context


def client_context(authority: Path | None) -> ssl.SSLContext:
    """Return the client's TLS context; it trusts the system's authorities, or only those in the given file."""
    try:
        return ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise InputError(f"cannot load: {error}", where=f"ca {authority}", way_out="Use a PEM file.") from None


def check_encrypted(settings: Settings) -> None:
    """Raise InputError for a plain-HTTP listener that other machines can reach, unless insecure_http is set."""
    host = settings["host"]
    if not is_loopback(host) and not settings["tls_cert"] and not settings["insecure_http"]:
        raise InputError(
            f"host {host!r} is reachable from other machines and tls_cert is not set: tokens would be sent in clear",
            way_out="Set --tls-cert and --tls-key; or listen on 127.0.0.1 behind a TLS proxy or ssh -L; or set "
            "--insecure-http in a network you trust.",
        )
