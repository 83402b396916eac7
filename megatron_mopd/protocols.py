"""What a backend must do. Each protocol has more than one implementation and one contract suite (tests/contract)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from megatron_mopd.scores import Scores
from megatron_mopd.types import Outcome, Prompt, Segment, Trajectory


@dataclass(frozen=True)
class SampleRequest:
    """Continue `token_ids` by at most `max_new_tokens` tokens, ending early at (and including) a stop id.

    With router replay the segment carries the routed experts of the input positions from `routed_positions` (those
    before it are in earlier segments) to the one that gave its last token: [routed_positions, P + n - 1) for P
    `token_ids` and n sampled tokens. See types.Segment.

    `begun_at` is the weight version of the trajectory's first tokens, None where it has none yet: an engine that keeps
    key-value cache over new weights keeps it apart by that version.
    """

    trajectory_id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    routed_positions: int = 0
    begun_at: int | None = None


@dataclass(frozen=True)
class ScoreRequest:
    """Score every response token after the teacher's prompt, observations included; masks are applied in training."""

    trajectory_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass
class KvUse:
    """Tokens of key-value cache that an engine kept over interruptions, added up since it was made; 0 where it keeps
    none (rollout.partial.kv=recompute)."""

    retained: int = 0
    """Held when their requests were interrupted."""
    reused: int = 0
    """There when their trajectories went on."""
    evicted: int = 0
    """Computed again, because they had made room for others or their trajectories went on elsewhere."""


class RolloutEngine(Protocol):
    """Samples from the student. Temperature and top-p are fixed at construction (config.rollout)."""

    weight_version: int
    kv: KvUse

    async def start(self) -> None:
        """Return once it can sample. Raises UserError for whatever would keep it from that."""
        ...

    async def generate(self, request: SampleRequest) -> Segment:
        """Return the sampled tokens with the log-prob of each under softmax(logits / temperature)."""
        ...

    async def update_weights(self, folder: Path | None, weight_version: int) -> None:
        """Load the Hugging Face folder that the trainer exported; later segments carry `weight_version`.

        None: the trainer has sent the weights by itself (`sglang.weight_transport=distributed`).
        """
        ...

    async def interrupt(self) -> None:
        """Let every `generate` that waits return what it has, with finish_reason "abort", perhaps without a token.

        Returns once nothing is sampled. What is asked for afterwards is sampled as usual.
        """
        ...

    async def close(self) -> None: ...


class EndpointDown(ConnectionError):
    """What is at `url` did not answer, or not as it should; the request may be sent elsewhere, or again later."""

    def __init__(self, url: str, reason: str):
        super().__init__(f"{url} is down: {reason}")
        self.url, self.reason = url, reason


class TeacherScorer(Protocol):
    """One endpoint at which frozen teachers prefill finished trajectories. What a failure means is the lane's decision
    (teachers/lanes.py): nothing is retried here."""

    url: str
    """Names the endpoint in messages."""

    async def prepare(self, teacher: str) -> None:
        """Return once it answers and has this teacher, and not another under its name.

        Raises EndpointDown to be asked again later, UserError for what waiting does not mend.
        """
        ...

    async def score(self, teacher: str, requests: Sequence[ScoreRequest]) -> list[np.ndarray]:
        """Return float32 log-probs [R] per request, one per response token, finite, at the student's temperature.

        Raises EndpointDown, or UserError for requests that can not be scored anywhere.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class HiddenScorer(TeacherScorer, Protocol):
    """One that also gives hidden states, which objectives over whole distributions need: the teacher service."""

    async def score_hidden(self, teacher: str, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """As `score`, with the hidden states [R, D] that the teacher's output layer reads at each response token."""
        ...


@dataclass(frozen=True)
class Observation:
    """What the environment answers to a sampled stretch: tokens to append (may be empty), and whether it is over."""

    token_ids: tuple[int, ...]
    done: bool


class Environment(Protocol):
    """One instance per trajectory, made from the prompt. See `rollout/environments.py` for the single-turn one."""

    stop_token_ids: tuple[int, ...]

    async def step(self, token_ids: tuple[int, ...]) -> Observation:
        """Take the tokens sampled since the last observation."""
        ...

    async def score(self, trajectory: Trajectory) -> Outcome:
        """Verify the finished trajectory."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """What an environment has besides, so that its trajectory can be interrupted and outlive the process."""

    async def snapshot(self) -> dict[str, Any]:
        """Its state between two steps, as JSON knows values. Nothing runs while it is taken."""
        ...

    async def restore(self, state: dict[str, Any]) -> None:
        """Called once, before anything else, on a new instance of the same prompt."""
        ...


class ResumableEnvironment(Environment, Resumable, Protocol):
    """The environments that partial rollouts take (rollout.partial)."""


class EnvironmentFactory(Protocol):
    """The class named in `environments.<name>.factory`: called with the prompt, the tokenizer and the `options`
    table."""

    def __call__(self, prompt: Prompt, tokenizer: object, **options: object) -> Environment: ...


@runtime_checkable
class PromptChecker(EnvironmentFactory, Protocol):
    """One that can tell whether a prompt has what its environment needs, before anything is built."""

    def check_prompt(self, prompt: Prompt, **options: object) -> None:
        """Raise UserError, which names the prompt and what it lacks."""
        ...


@runtime_checkable
class Verifier(Protocol):
    """Judges what a student ended with; environments call it (verifiers/). One instance serves many prompts at once."""

    def check(self, prompt: Prompt) -> None:
        """Raise ValueError, which says what is missing, where the prompt lacks what `verify` compares with."""
        ...

    async def verify(self, prompt: Prompt, answer: Any) -> float:
        """The reward: 1.0 for a correct answer, 0.0 for a wrong one, whatever the student wrote.

        `answer` is text for verifiers of text and programs, the state that the student left for those of states. It
        raises only where the verifier itself is at fault, never because of the answer.
        """
        ...


@dataclass(frozen=True)
class Execution:
    """How a program ended: what it printed, and its exit code, or "timeout", "killed" or "refused"."""

    stdout: str
    stderr: str
    ended: int | str


class Sandbox(Protocol):
    """Runs programs that nobody has read."""

    async def run(self, program: str, stdin: str) -> Execution:
        """Return once the program and all that it started are gone. A fault of the program is an Execution; it raises
        UserError where the sandbox itself cannot work."""
        ...


class WorkspaceFailed(RuntimeError):
    """A workspace cannot go on, or cannot be made: its trajectory fails, nothing else does. The message says why."""


class Workspace(Protocol):
    """A place in which an agent's commands run and leave state: files, and nothing that runs on between commands. One
    command at a time; calls that come meanwhile wait."""

    async def run(self, command: Sequence[str], stdin: bytes = b"", timeout_s: float | None = None) -> Execution:
        """Return once the program and all that it started are gone. Whatever a program does is an Execution: its exit
        code (128 + n where signal n ended it), "timeout", "killed" by a limit that `stderr` names in its last line, or
        "refused", for what is no command. None: the workspace's own time-out."""
        ...

    async def snapshot(self) -> str:
        """The name of a copy of the state that outlives this process. The same state has the same name."""
        ...

    async def restore(self, name: str) -> None:
        """Replace the state by that of the snapshot."""
        ...

    async def fork(self) -> Workspace:
        """Another workspace, with a copy of this one's state."""
        ...

    async def close(self) -> None:
        """End what runs and remove the state; snapshots stay."""
        ...


class WorkspaceFactory(Protocol):
    """One backend with its limits (sandbox/load.py)."""

    async def create(self) -> Workspace:
        """An empty workspace. Raises WorkspaceFailed after a bounded number of tries, UserError where no try helps."""
        ...

    async def close(self) -> None:
        """Close every workspace that it made."""
        ...
