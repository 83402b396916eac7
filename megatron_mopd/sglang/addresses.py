"""Hosts, ports and URLs of servers: what is refused of them, and how a port is kept.

Promise: after `check_urls` and `check_host` no request goes to something that is no URL, two roles never meet on one
server, and no server can be reached from other machines without a key.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError


def check_urls(config: Config) -> None:
    """Raise UserError for the first URL of a role in use that cannot be meant."""
    student, teachers = config.sglang.student, config.sglang.teachers
    urls = student.urls if config.rollout.engine == "sglang" else ()
    for i, url in enumerate(urls):
        _check_url(url, f"sglang.student.urls.{i}")
        if url in urls[:i]:
            raise UserError(f"sglang.student.urls.{i}={url} is there twice; remove one")
    if urls and student.num_servers > 1:
        raise UserError(
            f"sglang.student.num_servers={student.num_servers} starts servers, sglang.student.urls names some that run "
            "already; remove one of the two"
        )
    if config.teachers.backend == "sglang":
        for name, url in teachers.urls.items():
            _check_url(url, f"sglang.teachers.urls.{name}")
            if url in urls:
                raise UserError(
                    f"sglang.teachers.urls.{name}={url} is a student server too, which would load the student's "
                    "weights over the teacher's; give each its own"
                )


def _check_url(url: str, key: str) -> None:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no port
        whole = False
    if not whole or parts.query or parts.fragment or url.endswith("/") or any(c.isspace() for c in url):
        raise UserError(f"{key}={url!r} is no URL such as http://10.0.0.1:30000, without a slash at its end")


def answers(url: str) -> bool:
    """Whether something listens there now."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=2.0).close()
    except OSError:
        return False
    return True


def check_host(host: str, has_key: bool) -> None:
    """A server obeys whoever reaches it: it loads any folder, and answers with its weights."""
    if not is_loopback(host) and not has_key:
        raise UserError(
            f"sglang.host={host} can be reached from other machines; set sglang.api_key_env to a variable with a key, "
            "or use 127.0.0.1"
        )
    reserve_port(host).close()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def reserve_port(host: str) -> socket.socket:
    """A socket that is bound and never listens. Raises UserError where the machine has no such address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with ExitStack() as failed:
            reserved = failed.enter_context(socket.socket(family, kind, protocol))
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(address)
            failed.pop_all()
    except OSError as error:
        raise UserError(f"sglang.host={host}: {error.strerror}; set an address of this machine") from None
    return reserved


def url_of(host: str, port: int) -> str:
    """For clients: a server on all addresses of a machine is reached by the machine's name."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
