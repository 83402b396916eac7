"""Who holds a server that can hold one teacher's weights at a time."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from megatron_mopd.sglang import turns as module
from megatron_mopd.sglang.turns import Turns


async def ticks(count: int) -> None:
    """A clock that is the same on every machine: rounds of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


def serve(arrivals: list[tuple[int, str]], work: int = 10) -> list[str]:
    """The order in which keys are served; arrivals are (tick, key)."""
    served: list[str] = []

    async def one(turns: Turns, held: list[str], arrival: int, key: str) -> None:
        await ticks(arrival)
        async with turns.hold(key):
            held.append(key)
            assert set(held) == {key}, "two teachers at one time"
            served.append(key)
            await ticks(work)
            held.remove(key)

    async def body() -> None:
        turns, held = Turns(), []
        await asyncio.wait_for(asyncio.gather(*(one(turns, held, *arrival) for arrival in arrivals)), 20)

    asyncio.run(body())
    return served


def changes(served: list[str]) -> int:
    return sum(a != b for a, b in itertools.pairwise(served))


def test_all_are_served_and_never_two_teachers_at_once() -> None:
    drawn = random.Random(0)
    arrivals = [(drawn.randrange(1000), drawn.choice("abc")) for _ in range(300)]
    assert sorted(serve(arrivals)) == sorted(key for _, key in arrivals)


def test_what_waits_together_is_served_with_one_change_per_teacher() -> None:
    assert changes(serve([(0, key) for key in "abcabcabcabc"])) == 2


def test_who_has_waited_longest_comes_next() -> None:
    assert serve([(0, "a"), (1, "c"), (2, "b"), (3, "c")]) == ["a", "c", "c", "b"]


def test_newcomers_join_the_loaded_teacher_but_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = [(0, "a"), (1, "b"), *((5 * i, "a") for i in range(1, 40))]
    assert serve(arrivals).index("b") == 40
    monkeypatch.setattr(module, "PATIENCE", 3)
    assert serve(arrivals).index("b") == 4


def test_a_waiter_that_is_cancelled_leaves_the_server_to_others() -> None:
    async def body() -> str:
        turns = Turns()

        async def hold(key: str) -> str:
            async with turns.hold(key):
                return key

        async with turns.hold("a"):
            cancelled, waits = asyncio.create_task(hold("b")), asyncio.create_task(hold("c"))
            await asyncio.sleep(0)
            cancelled.cancel()
        return await asyncio.wait_for(waits, 5)

    assert asyncio.run(body()) == "c"


def test_one_that_is_cancelled_in_the_moment_of_its_turn_gives_it_back() -> None:
    async def body() -> None:
        turns = Turns()
        async with turns.hold("a"):
            waits = asyncio.create_task(turns.hold("b").__aenter__())
            await asyncio.sleep(0)
        waits.cancel()  # it has the turn, and has not run since
        with pytest.raises(asyncio.CancelledError):
            await waits
        async with asyncio.timeout(5), turns.hold("c"):
            pass

    asyncio.run(body())
