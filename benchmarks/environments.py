"""Conversations with tools against the same tokens without: idle engine, cost of a turn, memory of
one that waits.

    export OMP_NUM_THREADS=1
    python benchmarks/environments.py  # 1,024 conversations of 4 turns of 16 tokens
    python benchmarks/environments.py --places 128        # of which an engine runs 128 at once
    python benchmarks/environments.py --agents --conversations 256  # turns of agents alone

One process, vLLM on a CPU, and a model of 0.7M parameters. Rounds of three kinds alternate, and
medians are compared:

    no tools      one response of as many tokens as a conversation draws
    tools, 0 s    a tool that answers at once: what is added is the cost of turns
    tools         a tool that takes 50 ms to 5 s, log-uniformly

No batch ends before its slowest conversation: the bound of the time is that conversation's tools
and engine steps. Memory is that of Python's objects on the rank (tracemalloc) and of the worker
process (RSS), while all conversations wait.

--agents measures a turn in one worker process without an engine: an environment, and agents with
httpx and with the openai package, in rounds that alternate. A request has some 500 bytes, and is
parsed once by the server and once by the client: 10 us of a core. The rest is Python's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from workload import SIZES, Lengths, make_workload

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.load import load_config
from rlhf_mc.data.batch import NOTHING
from rlhf_mc.environments.environment_worker import Key, Turn
from rlhf_mc.environments.pool import EnvironmentPool
from rlhf_mc.environments.protocol import Completion, StepResult
from rlhf_mc.environments.turns import Conversations
from rlhf_mc.patching import replaced
from rlhf_mc.rollout.base import Request, Sampling
from rlhf_mc.rollout.engine_loop import generate_responses
from rlhf_mc.rollout.work_sharing import CLOCKS
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.session import session
from rlhf_mc.trainer import step_state
from rlhf_mc.trainer.pool import generate
from rlhf_mc.trainer.run import Run

TURNS = 4
TURN_TOKENS = 16
OBSERVATION = "3+4"
"""Four tokens or fewer."""
SECONDS = (0.05, 5.0)
WAIT = 1e5
ENVIRONMENT = """
import asyncio, json, math, random

class Environment:
    def __init__(self, control):
        self.control = control
        self.turns = 0
        self.random = random.Random()

    async def reset(self, row):
        pass

    async def step(self, response):
        low, high = json.load(open(self.control))
        self.turns += 1
        seconds = math.exp(self.random.uniform(math.log(low), math.log(high))) if high else 0
        await asyncio.sleep(seconds)
        return %r, 0.0, self.turns == %d, {}
"""


AGENT = """
import httpx
from openai import AsyncOpenAI

clients = {}

async def run(task, client_settings, kind):
    url, key = client_settings["base_url"], client_settings["api_key"]
    if not clients:
        clients["openai"] = AsyncOpenAI(base_url=url, api_key=key)
        clients["httpx"] = httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=600)
    messages = [*task["prompt"]]
    for turn in range(%d):
        if kind == "openai":
            completions = clients[kind].with_options(api_key=key).chat.completions
            answer = (await completions.create(model="", messages=messages)).choices[0].message
        else:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"messages": messages}
            response = await clients[kind].post(
                url + "/chat/completions", json=body, headers=headers
            )
            answer = response.json()["choices"][0]["message"]
        messages += [answer, {"role": "user", "content": "3+4"}]
"""


class Timed:
    """Seconds without work and turns of one call of the engines, and bytes of a waiting
    conversation."""

    def __init__(self) -> None:
        self.idle = 0.0
        self.turns = 0
        self.rank_bytes = 0.0
        self.worker_bytes = 0.0


def generated(run: Run, control: Path, seconds: tuple[float, float] | None) -> tuple[float, int]:
    """Generate a batch with tools that take these seconds; None: without tools. Return (seconds,
    drawn tokens)."""
    state = step_state.begin_step(1, RankStatus())
    prompts = run.train_prompts.select(range(run.config.data.train_batch_size))
    limit = run.config.data.max_response_length
    if seconds is None:
        run = replace(run, environments=None)
        limit = TURNS * TURN_TOKENS
    else:
        control.write_text(json.dumps(seconds))
    generate.update_weights(run, state.timer)
    start = time.perf_counter()
    requests = [Request(i, prompt.token_ids, i, NOTHING) for i, prompt in enumerate(prompts)]
    turns = None
    if run.environments is not None:
        turns = Conversations(run.environments, requests, prompts)
        requests = turns.requests
    clock = CLOCKS[run.config.rollout.clock]()
    responses = generate_responses(
        run.rollout, requests, Sampling(1.0, limit, ()), clock, turns=turns
    )
    took = time.perf_counter() - start
    return took, sum(response.num_drawn for response in responses.values())


def watch(timed: Timed, memory: Callable[[], tuple[float, float]] | None = None) -> Any:
    """Return a Conversations.receive that measures; with `memory`, which returns the bytes on the
    rank and in its workers, it ends the call once all conversations wait."""
    before = (0.0, 0.0) if memory is None else memory()

    original = Conversations.receive

    def receive(self: Conversations, is_idle: bool) -> Any:
        start = time.perf_counter()
        out = original(self, is_idle)
        timed.idle += (time.perf_counter() - start) * is_idle
        timed.turns += len(out.requests) + len(out.ended)
        if memory is not None and is_idle and self.num_waiting:
            time.sleep(2)  # the last turns reach the worker
            after = memory()
            timed.rank_bytes = (after[0] - before[0]) / self.num_waiting
            timed.worker_bytes = (after[1] - before[1]) / self.num_waiting
            raise StopIteration
        return out

    return replaced(Conversations, "receive", receive)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=1024)
    parser.add_argument("--places", type=int, default=1024, help="rollout.max_num_seqs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--agents", action="store_true", help="turns of agents alone")
    args = parser.parse_args()
    if args.agents:
        _measure_agents(args.conversations, args.rounds)
        return 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        control = directory / "control.json"
        control.write_text("[0, 0]")
        (directory / "tool.py").write_text(ENVIRONMENT % (OBSERVATION, TURNS))
        config = make_workload(
            directory,
            SIZES["0.7M"],
            Lengths(TURNS * (TURN_TOKENS + 8), 0.0),
            args.conversations,
            rollout={
                "max_num_seqs": args.places,
                "environment": {
                    "path": str(directory / "tool.py"),
                    "kwargs": {"control": str(control)},
                    "max_tokens_per_turn": TURN_TOKENS,
                    "timeout_seconds": 2 * WAIT,
                },
            },
            custom_reward_function={"path": None},
            trainer={"logger": [], "default_local_dir": str(directory / "run")},
        )
        cfg = load_config(str(config), [])
        with session(cfg, RankStatus(), StopRequests(cfg.trainer)) as run:
            _measure(run, control, args.rounds)
    return 0


def _measure(run: Run, control: Path, rounds: int) -> None:
    kinds: dict[str, tuple[float, float] | None] = {
        "no tools": None,
        "tools, 0 s": (0, 0),
        "tools": SECONDS,
    }
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    idle: dict[str, list[float]] = {kind: [] for kind in kinds}
    turns = 0
    for number in range(rounds + 1):  # the first one warms up
        for kind, seconds in kinds.items():
            timed = Timed()
            with watch(timed):
                whole, drawn = generated(run, control, seconds)
            share = timed.idle / whole
            print(
                f"round {number}, {kind}: {whole:.2f} s, {drawn} tokens drawn, idle {share:.1%}",
                flush=True,
            )
            turns = timed.turns or turns
            if number:
                took[kind].append(whole)
                idle[kind].append(share)
    plain, instant, slow = (statistics.median(took[kind]) for kind in kinds)
    of = "of the time without tools"
    print(
        f"overhead of a turn: {(instant - plain) / turns * 1e3:.2f} ms ({turns} turns, "
        f"{instant / plain:.2f} {of})"
    )
    share = statistics.median(idle["tools"])
    print(f"tools of {SECONDS[0]} to {SECONDS[1]} s: {slow / plain:.2f} {of}, idle {share:.1%}")
    timed = Timed()

    def memory() -> tuple[float, float]:
        workers = sum(
            process.memory_info().rss for process in psutil.Process().children(recursive=True)
        )
        return float(tracemalloc.get_traced_memory()[0]), float(workers)

    tracemalloc.start()
    try:
        with watch(timed, memory):
            generated(run, control, (WAIT, WAIT))
    except StopIteration:
        rank, worker = (each / 1e3 for each in (timed.rank_bytes, timed.worker_bytes))
        print(f"a waiting conversation: {rank:.1f} kB on the rank, {worker:.1f} kB in its worker")


def _measure_agents(conversations: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        control = directory / "control.json"
        control.write_text("[0, 0]")
        (directory / "tool.py").write_text(ENVIRONMENT % (OBSERVATION, TURNS))
        (directory / "agent.py").write_text(AGENT % TURNS)
        common: dict[str, Any] = {"num_workers": 1, "timeout_seconds": 600.0}
        kinds = {
            "environment": EnvironmentConfig(
                path=str(directory / "tool.py"), kwargs={"control": str(control)}, **common
            )
        } | {
            kind: EnvironmentConfig(
                path=str(directory / "agent.py"), name="openai", kwargs={"kind": kind}, **common
            )
            for kind in ("httpx", "openai")
        }
        pools = {kind: EnvironmentPool(cfg) for kind, cfg in kinds.items()}
        took: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(rounds + 1):  # the first one warms up
            for kind, pool in pools.items():
                seconds = _played(pool, number, conversations)
                took[kind].append(seconds / conversations / TURNS * 1e3)
                print(f"round {number}, {kind}: {took[kind][-1]:.2f} ms a turn", flush=True)
        medians = {kind: statistics.median(times[1:]) for kind, times in took.items()}
        for kind, median in medians.items():
            ratio = median / medians["environment"]
            print(f"{kind}: {median:.2f} ms a turn, {ratio:.1f} of the environment's")
        for pool in pools.values():
            pool.close()


def _played(pool: EnvironmentPool, call: int, conversations: int) -> float:
    """Play conversations at the same time. Return the seconds."""
    prompt = [{"role": "user", "content": "1+2"}]
    row = {"prompt": prompt, "ground_truth": "3", "extra_info": {}, "sampling": {}}
    start = time.perf_counter()

    def submit(key: Key, is_first: bool) -> None:
        turn = Completion("", [-1.0] * TURN_TOKENS, 0, True, False)
        tokens = [*range(TURN_TOKENS)]
        pool.submit(Turn(key, row if is_first else None, "4" * TURN_TOKENS, tokens, [], turn))

    left = {(call, number) for number in range(conversations)}
    for key in left:
        submit(key, True)
    while left:
        for key, answer in pool.take(60.0).items():
            assert isinstance(answer, StepResult), answer
            if answer.done:
                left.discard(key)
                pool.end(key)
            else:
                submit(key, False)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
