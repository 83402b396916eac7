"""The Megatron teacher service: a torchrun job that answers over HTTP with log-probs of its teachers.

    python -m megatron_mopd.mcore.serve_teacher CONFIG [a.b=c ...]          (on each rank, under torchrun or alone)

Rank 0 has the front, a thread with an HTTP server and a queue (megatron_mopd/service/). All ranks run one loop: rank 0
takes the next batch of one teacher and broadcasts it, all score it, rank 0 answers. SIGTERM or SIGINT drains: what
waits is answered, then every rank ends with exit code 0. A rank that dies ends all. A batch that cannot be scored fails
alone. No learner is made here.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_mopd.cli import run_rank
from megatron_mopd.config import Config
from megatron_mopd.errors import UserError
from megatron_mopd.mcore import device, parallel
from megatron_mopd.mcore.teacher_ranks import TeacherRanks, max_tokens, service_layout
from megatron_mopd.ranks import rank
from megatron_mopd.teachers.identity import fingerprint
from megatron_mopd.token_rows import TokenRows

if TYPE_CHECKING:
    from megatron_mopd.service.front import Front, ScoreWork, Served

HEARTBEAT_S = 1.0
"""While nothing waits the ranks meet this often, so that none times out and all see the end."""


class Order(enum.IntEnum):
    """What rank 0 tells the others to do next."""

    WAIT, SCORE, SCORE_HIDDEN, END = range(4)


def serve(config: Config) -> None:
    parallel.init_distributed(config.run.timeout_s)
    parallel.initialize_parallel(service_layout(config), config.run.seed)
    front = start_front(config) if rank() == 0 else None
    if front is None:  # rank 0 hears the signals, and tells the others when all is answered
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    ranks = TeacherRanks(config)
    answer_until_drained(front, ranks, [teacher.name for teacher in config.teachers.on("megatron")])
    if front is not None:
        front.close()
    parallel.shutdown()


def start_front(config: Config) -> Front:
    """It answers at once that the service is starting, and takes work once the loop runs."""
    from megatron_mopd.service.front import Front

    served = what_is_served(config)
    front = Front(config, served)
    print(f"teacher service at {front.start()}: {', '.join(served)}", flush=True)
    return front


def what_is_served(config: Config) -> dict[str, Served]:
    from megatron_mopd.service.front import Served

    served = {}
    for teacher in config.teachers.on("megatron"):
        identity = fingerprint(teacher.checkpoint, teacher.megatron_checkpoint, f"teacher {teacher.name}")
        served[teacher.name] = Served(str(identity), identity.vocab_size, max_tokens(teacher.checkpoint))
    return served


def answer_until_drained(front: Front | None, ranks: TeacherRanks, names: Sequence[str]) -> None:
    """The loop. `front` is rank 0's; `names` are the teachers in the order of the configuration."""
    while True:
        work = None if front is None else front.take(HEARTBEAT_S)
        order, teacher, rows = exchange(front, work, names)
        if order is Order.END:
            return
        if order is Order.WAIT:
            continue
        score = ranks.score_hidden if order is Order.SCORE_HIDDEN else ranks.score
        try:
            scores = score(names[teacher], rows)
        except UserError as error:  # of this batch or this teacher alone
            if work is not None:
                work.failed(error)
        else:
            if work is not None:
                assert scores is not None
                work.done(scores)


def exchange(front: Front | None, work: ScoreWork | None, names: Sequence[str]) -> tuple[Order, int, TokenRows]:
    """What rank 0 has taken, on every rank: order, index of the teacher, its rows."""
    header = torch.zeros(4, dtype=torch.int64)
    if work is not None:
        order = Order.SCORE_HIDDEN if work.with_hidden else Order.SCORE
        header = torch.tensor([order, names.index(work.teacher), len(work.rows), len(work.rows.token_ids)])
    elif front is not None and front.drained:
        header[0] = Order.END
    order, teacher, num_rows, num_tokens = _broadcast(header).tolist()
    if order not in (Order.SCORE, Order.SCORE_HIDDEN):
        return Order(order), teacher, TokenRows.of([], [])
    size = 2 * num_rows + num_tokens
    content = torch.zeros(size, dtype=torch.int32) if work is None else _content(work.rows)
    lengths, token_ids = np.split(_broadcast(content).numpy(), [2 * num_rows])
    prompt_lengths, response_lengths = lengths.astype(np.int64).reshape(2, num_rows)
    return Order(order), teacher, TokenRows(token_ids, prompt_lengths, response_lengths)


def _content(rows: TokenRows) -> Tensor:
    """int32: the lengths of the prompts and of the responses, then the tokens."""
    columns = (rows.prompt_lengths, rows.response_lengths, rows.token_ids)
    return torch.from_numpy(np.concatenate(columns, dtype=np.int32, casting="same_kind"))


def _broadcast(tensor: Tensor) -> Tensor:
    """Rank 0's tensor, on the host of every rank."""
    on_device = tensor.to(device.DEVICE)
    dist.broadcast(on_device, src=0)
    return on_device.cpu()


if __name__ == "__main__":
    run_rank(serve)
