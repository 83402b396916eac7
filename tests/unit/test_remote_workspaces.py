"""The client of a service of workspaces against a service that is away, loses replies, or wants another key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from workspaces import TOKEN, Service, local

from megatron_mopd.errors import UserError
from megatron_mopd.protocols import WorkspaceFailed
from megatron_mopd.sandbox import remote
from megatron_mopd.sandbox.load import load_workspaces
from megatron_mopd.sandbox.remote import RemoteWorkspaces

Body = Callable[[RemoteWorkspaces, Service], Awaitable[Any]]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSES_S", (0.01,))
    monkeypatch.setenv("MOPD_TEST_TOKEN", TOKEN)


def play(folder: Path, body: Body, **options: Any) -> None:
    async def with_service() -> None:
        factory = local(folder)
        service = Service(factory, TOKEN)
        async with service.serving() as url:
            workspaces = RemoteWorkspaces(url=url, **{"api_key_env": "MOPD_TEST_TOKEN", "tries": 3, **options})
            try:
                await body(workspaces, service)
            finally:
                service.break_next.clear()
                await workspaces.close()
        await factory.close()

    asyncio.run(with_service())


def test_a_command_whose_reply_was_lost_runs_once(tmp_path: Path) -> None:
    async def body(workspaces: RemoteWorkspaces, service: Service) -> None:
        service.break_next = [503, 429]
        workspace = await workspaces.create()
        service.break_next = ["lose", 500]
        done = await workspace.run(["sh", "-c", "echo once >> f; cat f"])
        assert (done.stdout, service.num_runs) == ("once\n", 1)

    play(tmp_path, body)


def test_a_sandbox_that_cannot_start_is_named_after_bounded_tries(tmp_path: Path) -> None:
    async def body(workspaces: RemoteWorkspaces, service: Service) -> None:
        service.break_next = [503] * 10
        with pytest.raises(WorkspaceFailed, match=r"/workspaces failed 3 times: .* answered 503"):
            await workspaces.create()
        assert len(service.break_next) == 7

    play(tmp_path, body)


def test_a_service_that_is_not_there_is_named() -> None:
    async def body() -> None:
        workspaces = RemoteWorkspaces(url="http://127.0.0.1:9", tries=2)
        with pytest.raises(WorkspaceFailed, match=r"failed 2 times: .* cannot connect"):
            await workspaces.create()
        await workspaces.close()

    asyncio.run(body())


def test_another_key_is_a_mistake_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(workspaces: RemoteWorkspaces, service: Service) -> None:
        with pytest.raises(UserError, match="api_key_env"):
            await workspaces.create()

    monkeypatch.setenv("MOPD_TEST_TOKEN", "another")
    play(tmp_path, body)


def test_wrong_options_are_refused() -> None:
    for options, reason in (
        ({"url": "http://10.0.0.1:80"}, "set api_key_env"),
        ({"url": "nothing"}, "no URL"),
        ({"api_key_env": "MOPD_NO_SUCH_VARIABLE"}, "is not set"),
        ({"tries": 0}, "above 0"),
        ({"try": 1}, "unexpected keyword argument 'try'"),
    ):
        with pytest.raises(UserError, match=reason):
            load_workspaces("remote", options)
    with pytest.raises(UserError, match="name one of bubblewrap, remote"):
        load_workspaces("docker", {})
    with pytest.raises(UserError, match="missing 1 required positional argument: 'folder'"):
        load_workspaces("bubblewrap", {})
