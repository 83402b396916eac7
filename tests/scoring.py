"""A front that answers by a formula: the HTTP side of the teacher service without Megatron."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tiny import VOCAB_SIZE

from megatron_mopd.config import Config
from megatron_mopd.scores import Scores
from megatron_mopd.service.front import Front, ScoreWork, Served
from megatron_mopd.token_rows import TokenRows

TEACHERS = ("a", "b")
MAX_TOKENS = 64
WIDTH = 6


def config_of(folder: Path, **tables: Any) -> Config:
    """Teachers on the backend megatron, with a service that is not slow to end."""
    teachers = {"backend": "megatron", **tables.pop("teachers", {})}
    models = [{"name": n, "domain": "d", "effort": n, "checkpoint": str(folder / n)} for n in TEACHERS]
    return Config.model_validate(
        {
            "run": {"folder": str(folder / "run"), "num_steps": 1},
            "student": {"checkpoint": str(folder / "a")},
            "teachers": {"models": models, **teachers},
            "prompts": {"files": [], "batch_size": 1, "mixture": {"d": 1.0}, "efforts": dict.fromkeys(TEACHERS, 1.0)},
            "environments": {},
            "rollout": {"max_response_tokens": 8},
            **tables,
        }
    )


def formula(teacher: str, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    return -(np.float32(len(prompt)) + np.arange(len(response)) + response / 1000 + ord(teacher[0])).astype(np.float32)


def hidden_of(teacher: str, response: np.ndarray) -> np.ndarray:
    """[R, WIDTH], the bits of bfloat16 numbers."""
    return (0x3F80 + (response[:, None] + np.arange(WIDTH) + ord(teacher[0])) % 100).astype(np.uint16)


def scores_of(work: ScoreWork, answer: Callable[[str, np.ndarray, np.ndarray], np.ndarray] = formula) -> Scores:
    rows = [(answer(work.teacher, p, r), hidden_of(work.teacher, r)) for p, r in work.rows]
    logprobs, hidden = zip(*rows, strict=True)
    return Scores(np.concatenate(logprobs), np.concatenate(hidden))


class Scoring:
    """`gate` open: work is answered. `works` are the batches so far, `answer` what they are answered with."""

    def __init__(self, front: Front):
        self.front, self.url = front, front.start()
        self.gate, self._stop = threading.Event(), threading.Event()
        self.gate.set()
        self.works: list[ScoreWork] = []
        self.failure: Exception | None = None
        self.answer = formula
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    @property
    def num_rows(self) -> int:
        return sum(len(work.rows) for work in self.works)

    def _answer(self) -> None:
        while not self._stop.is_set() and not self.front.drained:
            if (work := self.front.take(0.02)) is None:
                continue
            self.works.append(work)
            self.gate.wait()
            if self.failure is not None:
                work.failed(self.failure)
            else:
                work.done(scores_of(work, self.answer))

    def ended(self, within_s: float) -> bool:
        """Whether the front has been drained in that time."""
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        self.gate.set()
        self._stop.set()
        self._thread.join()
        self.front.close()


@contextmanager
def scoring(config: Config, served: Mapping[str, Served] | None = None) -> Iterator[Scoring]:
    served = served or {name: Served(f"print-{name}", VOCAB_SIZE, MAX_TOKENS) for name in TEACHERS}
    running = Scoring(Front(config, served))
    try:
        yield running
    finally:
        running.close()


def token_rows(count: int, seed: int = 0) -> TokenRows:
    """Prompts of 1 to 9 tokens, responses of 0 to 19."""
    return TokenRows.of(*rows(count, seed))


def rows(count: int, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Prompts of 1 to 9 tokens, responses of 0 to 19."""
    rng = np.random.default_rng(seed)
    sizes = [(1 + i % 9, i % 20) for i in range(count)]
    prompts, responses = ([rng.integers(0, VOCAB_SIZE, pair[i]).astype(np.int32) for pair in sizes] for i in (0, 1))
    return prompts, responses


async def until(condition: Any, within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


async def send(
    session: aiohttp.ClientSession, url: str, body: bytes | dict[str, Any], **headers: str
) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and body of the answer to POST /score. `Idempotency_Key` is a header's name."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    options: dict[str, Any] = {"json": body} if isinstance(body, dict) else {"data": io.BytesIO(body)}
    async with session.post(f"{url}/score", headers=given, **options) as response:
        return response.status, response.headers, await response.read()
