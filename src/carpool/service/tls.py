"""TLS: what is sent to a daemon beyond its machine is encrypted, or somebody has said that it need not be."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

from carpool.core.errors import InputError
from carpool.service.config import Settings
from carpool.service.sockets import is_loopback


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


def check_private(settings: Settings) -> None:
    """InputError where what is sent from elsewhere could be read on its way, and nobody has said that it may."""
    host = settings["host"]
    if not is_loopback(host) and not settings["tls_cert"] and not settings["insecure_http"]:
        raise InputError(
            f"host is {host!r}, which is reached from elsewhere, and there is no certificate: tokens could be read",
            way_out="Give --tls-cert and --tls-key; or listen on 127.0.0.1 behind a proxy with TLS or ssh -L; or, in a "
            "network that you trust, say --insecure-http.",
        )
