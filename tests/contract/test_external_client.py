"""An external client, the `openai` package, plays a tool task with a model that was taught it in a few steps: what the
gateway records is what the embedded engine sampled."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from chat import VOCAB_SIZE, write_chat_folder
from tiny import write_checkpoint

from megatron_mopd.embedded.engine import EmbeddedEngine
from megatron_mopd.prompts.render import Renderer
from megatron_mopd.protocols import SampleRequest
from megatron_mopd.rollout.gateway import Gateway
from megatron_mopd.trajectory_file import read_trajectories
from megatron_mopd.types import Prompt, Segment, Trajectory

TOOLS = [{"type": "function", "function": {"name": "look"}}]
CALL = {"id": "c", "function": {"name": "look", "arguments": '{"key":"A"}'}}
TASK: list[dict[str, Any]] = [
    {"role": "user", "content": "A?"},
    {"role": "assistant", "reasoning_content": "look", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "7"},
    {"role": "assistant", "reasoning_content": "it is", "content": "seven"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "reasoning_content": "", "content": "Yes."},
]
LOSS = 0.02
"""At which the model says its lines almost always; what else it says is recorded as well."""


class Spy(EmbeddedEngine):
    """Keeps what it has sampled."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.sampled: dict[str, list[Segment]] = {}

    async def generate(self, request: SampleRequest) -> Segment:
        segment = await super().generate(request)
        self.sampled.setdefault(request.trajectory_id, []).append(segment)
        return segment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("student")
    fields = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "mlp_only_layers": [], "initializer_range": 0.05}
    write_checkpoint(folder, **fields)
    write_chat_folder(folder)
    teach(folder, renderer_of(folder))
    return folder


def renderer_of(folder: Path) -> Renderer:
    return Renderer(folder, "thinking_effort", "xtml")


def teach(folder: Path, renderer: Renderer) -> None:
    """The lines of the task, by heart."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole = torch.tensor(renderer.encode([renderer.text(TASK, None, "task", tools=TOOLS)]))
    spoken = torch.zeros_like(whole, dtype=torch.bool)
    for i in (1, 3, 5):
        begin, end = (
            len(renderer.encode([renderer.text(TASK[:k], None, "task", add_generation_prompt=k == i, tools=TOOLS)])[0])
            for k in (i, i + 1)
        )
        spoken[0, begin:end] = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        logits = model(input_ids=whole).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[spoken[:, 1:]], whole[:, 1:][spoken[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < LOSS:
            break
    assert loss < LOSS
    model.save_pretrained(folder)


async def complete(client: openai.AsyncOpenAI, messages: Sequence[Any], streams: bool) -> tuple[dict[str, Any], str]:
    """The assistant's message, as the client would send it back, and the reason why it ended."""
    options: dict[str, Any] = {"model": "student", "messages": list(messages), "tools": TOOLS}
    if not streams:
        choice = (await client.chat.completions.create(**options)).choices[0]
        return choice.message.model_dump(exclude_none=True), choice.finish_reason
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    reason = ""
    async for event in await client.chat.completions.create(**options, stream=True):
        delta, reason = event.choices[0].delta, event.choices[0].finish_reason or reason
        message["content"] += delta.content or ""
        message["reasoning_content"] += (delta.model_extra or {}).get("reasoning_content", "")
        for piece in delta.tool_calls or []:
            assert piece.function is not None
            new = {"id": piece.id, "type": "function", "function": {"name": piece.function.name, "arguments": ""}}
            calls.setdefault(piece.index, new)["function"]["arguments"] += piece.function.arguments or ""
    return message | ({"tool_calls": list(calls.values())} if calls else {}), reason


async def agent(gateway: Gateway, name: str, streams: bool, notes: list[str]) -> Trajectory:
    """Answer calls until there are none, ask once more, stop."""
    session = await gateway.open(Prompt(name, "agents", "", "tool", ()), name)
    messages: list[dict[str, Any]] = [TASK[0]]
    async with openai.AsyncOpenAI(base_url=gateway.base_url(session), api_key="none", max_retries=0) as client:
        for _ in range(4):
            message, reason = await complete(client, messages, streams)
            messages.append(message)
            notes.append(reason)
            if reason == "tool_calls":
                for call in message["tool_calls"]:
                    assert json.loads(call["function"]["arguments"]) == {"key": "A"}
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "7"})
            elif reason == "stop" and messages[-1].get("content") == "seven":
                messages.append(TASK[4])
            else:
                break
    notes.append(messages[-1].get("content") or "")
    trajectory = await gateway.close(session)
    assert trajectory is not None
    return trajectory


def play(folder: Path, num_sessions: int, streams: bool) -> None:
    async def body() -> list[list[str]]:
        engine, renderer = Spy(folder, seed=3, temperature=0.1), renderer_of(folder)
        gateway = Gateway(engine, renderer, max_response_tokens=400, max_tokens=1000, temperature=0.1)
        await gateway.start()
        notes: list[list[str]] = [[] for _ in range(num_sessions)]
        found = await asyncio.gather(*(agent(gateway, f"p{k}", streams, note) for k, note in enumerate(notes)))
        for trajectory in found:
            check_is_what_was_sampled(trajectory, engine.sampled[trajectory.id])
        await gateway.stop()
        await engine.close()
        return notes

    notes = asyncio.run(asyncio.wait_for(body(), 240))
    learnt = [note == ["tool_calls", "stop", "stop", "Yes."] for note in notes]
    assert sum(learnt) > 0.8 * num_sessions, notes


def check_is_what_was_sampled(trajectory: Trajectory, sampled: Sequence[Segment]) -> None:
    """Ids, log-probs and versions, to the bit; and everything else is masked."""
    spoken = [segment for segment in trajectory.segments if any(segment.loss_mask)]
    assert spoken == list(sampled)
    observed = [segment for segment in trajectory.segments if not any(segment.loss_mask)]
    assert len(observed) == len(spoken) - 1
    assert trajectory.rollout_logprobs[~trajectory.loss_mask].tolist() == [0.0] * int((~trajectory.loss_mask).sum())


@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_task_is_recorded_as_it_was_sampled(folder: Path, streams: bool) -> None:
    play(folder, 1, streams)


def test_the_command_serves_a_student_and_keeps_what_was_played(folder: Path, tmp_path: Path) -> None:
    tree = {
        "run": {"folder": str(tmp_path / "run"), "num_steps": 1},
        "student": {"checkpoint": str(folder)},
        "prompts": {"batch_size": 1, "mixture": {"agents": 1}, "chat_template": "xtml", "keep_thinking": True},
        "rollout": {"max_response_tokens": 400, "temperature": 0.1},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(tree))
    words = [sys.executable, "-m", "megatron_mopd.cli", "gateway", str(tmp_path / "mine.yaml")]
    server = subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert server.stdout is not None
        said = server.stdout.readline()
        url = said.split()[1].rstrip(";")
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            opened: Any = client.post("/sessions", body={"domain": "agents", "id": "t"}, cast_to=object)
            player = client.with_options(base_url=f"{url}{opened['base_path']}")
            asked: dict[str, Any] = {"model": "student", "messages": TASK[:1], "tools": TOOLS}
            answer = player.chat.completions.create(**asked)
            ended: Any = client.delete(f"/sessions/{opened['id']}", cast_to=object)
    finally:
        server.terminate()
        out, err = server.communicate(timeout=60)
    assert (server.returncode, err) == (0, ""), out
    (kept,) = read_trajectories(tmp_path / "run" / "gateway" / f"{ended['trajectory']}.safetensors")
    assert answer.usage is not None
    assert len(kept.trajectory.response_ids) == answer.usage.completion_tokens == ended["sampled_tokens"]


def test_a_gateway_that_others_could_reach_is_refused_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    tree = {
        "run": {"folder": str(tmp_path / "run"), "num_steps": 1},
        "student": {"checkpoint": str(folder)},
        "prompts": {"batch_size": 1, "mixture": {"agents": 1}, "chat_template": "xtml", "keep_thinking": True},
        "rollout": {"max_response_tokens": 400},
        "gateway": {"host": "0.0.0.0"},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(tree))
    words = [sys.executable, "-m", "megatron_mopd.cli", "gateway", str(tmp_path / "mine.yaml")]
    done = subprocess.run(words, text=True, capture_output=True, check=False)
    assert done.returncode == 2
    assert "gateway.host=0.0.0.0 can be reached from other machines; set gateway.api_key_env" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run" / "gateway").exists()


def test_many_sessions_at_once(folder: Path) -> None:
    play(folder, 32, streams=False)
