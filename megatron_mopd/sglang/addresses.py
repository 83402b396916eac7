"""URLs of SGLang servers that run already: what is refused of them.

Promise: after `check_urls` no request goes to something that is no URL, and two roles never meet on one server.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.servers.addresses import check_url


def check_urls(config: Config) -> None:
    """Raise UserError for the first URL of a role in use that cannot be meant."""
    student = config.sglang.student
    urls = student.urls if config.rollout.engine == "sglang" else ()
    _check(urls, "sglang.student.urls")
    if urls and student.num_servers > 1:
        raise UserError(
            f"sglang.student.num_servers={student.num_servers} starts servers, sglang.student.urls names some that run "
            "already; remove one of the two"
        )
    for teacher in config.teachers.on("sglang"):
        replicas, key = config.sglang.teachers.urls.get(teacher.name, ()), f"sglang.teachers.urls.{teacher.name}"
        _check(replicas, key)
        for i, url in enumerate(replicas):
            if url in urls:
                raise UserError(
                    f"{key}.{i}={url} is a student server too, which would load the student's weights over the "
                    "teacher's; give each its own"
                )


def _check(urls: Sequence[str], key: str) -> None:
    for i, url in enumerate(urls):
        check_url(url, f"{key}.{i}")
        if url in urls[:i]:
            raise UserError(f"{key}.{i}={url} is there twice; remove one")
