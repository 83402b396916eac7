"""Hosts, ports, URLs and keys of servers: what is refused of them, and how a port is kept. Torch-free.

Promise: after `check_url` and `check_host` no request goes to something that is no URL, and no server can be reached
from other machines without a key.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

from megatron_mopd.errors import UserError


def check_url(url: str, option: str) -> None:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:  # a port that is no port, a name that is no name
        whole = False
    if not whole or parts.query or parts.fragment or url.endswith("/") or any(c.isspace() for c in url):
        raise UserError(f"{option}={url!r} is no URL such as http://10.0.0.1:30000, without a slash at its end")


def answers(url: str) -> bool:
    """Whether something listens there now."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=2.0).close()
    except OSError:
        return False
    return True


def read_api_key(table: str, variable: str | None) -> str | None:
    """The key of the servers of `table` (sglang or service), from the environment."""
    if variable and not os.environ.get(variable):
        raise UserError(f"{table}.api_key_env names {variable}, which is not set; export {variable}=...")
    return os.environ[variable] if variable else None


def check_host(table: str, host: str, has_key: bool) -> None:
    """A server obeys whoever reaches it, and may load any folder or answer with its weights."""
    if not is_loopback(host) and not has_key:
        raise UserError(
            f"{table}.host={host} can be reached from other machines; set {table}.api_key_env to a variable with a "
            "key, or use 127.0.0.1"
        )
    reserve_port(host, table).close()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def reserve_port(host: str, table: str, port: int = 0) -> socket.socket:
    """A socket that is bound and never listens; port 0: a free one. Raises UserError where the machine has no such
    address, or another process has the port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as failed:
            reserved = failed.enter_context(socket.socket(family, kind, protocol))
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(address)
            failed.pop_all()
    except UnicodeError as error:
        raise UserError(f"{table}.host={host!r} is no name of a host: {error}") from None
    except OSError as error:
        if port:
            raise UserError(f"{table}.port={port}: {error.strerror}; set another, or 0 for a free one") from None
        raise UserError(f"{table}.host={host}: {error.strerror}; set an address of this machine") from None
    return reserved


def url_of(host: str, port: int) -> str:
    """For clients: a server on all addresses of a machine is reached by the machine's name."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
