"""Each program of examples/, run as from the command line."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import sys
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import export_conversations
import forked
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gsm8k import gsm8k_lines
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlhf_mc.algorithms.estimators import EstimatorInputs
from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.schema import CustomRewardFunctionConfig
from rlhf_mc.environments.environment_worker import Turn
from rlhf_mc.environments.pool import EnvironmentPool
from rlhf_mc.environments.protocol import Completion, StepResult, ToolCall
from rlhf_mc.report.run_reader import read_run
from rlhf_mc.rewards.scoring import load_reward_function

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHORT = [
    "trainer.total_training_steps=2",
    "trainer.target_val_acc=null",
    "trainer.val_before_train=false",
]
SMALL = [
    "data.train_batch_size=8",
    "data.val_max_samples=8",
    "rollout.n=4",
    "actor.ppo_mini_batch_size=4",
]


def run_example(name: str, arguments: list[str], world: int = 1) -> list[str]:
    """Run examples/NAME on `world` ranks. Return its lines of output."""
    done = forked.run_ranks(world, [str(EXAMPLES / name), *arguments])
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout.splitlines()


def load_example(name: str) -> ModuleType:
    """Import examples/NAME without running it."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def metrics(directory: Path) -> list[dict[str, float]]:
    """Return the metrics of the run, one dict per step."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def step_lines(output: list[str]) -> list[str]:
    """Return the part before the colon of each line that an example prints about a step."""
    return [found.group(1) for line in output if (found := re.match(r"(step \d+):", line))]


def test_every_example_has_a_test() -> None:
    tests = Path(__file__).read_text() + (Path(__file__).parent / "test_real_model.py").read_text()
    tests = re.sub(r"([(\[])\s+", r"\1", tests)  # arguments on lines of their own
    names = {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"}
    uses = (
        'run_example("{}.py"',
        'examples" / "{}.py"',
        'tool_file("{}.py"',
        "tool_file('{}.py'",
        "class_name: examples.{}.",
        '"{}.py": (',  # of CONVERSATIONS
        'EXAMPLES / "{}.py"',
    )
    assert {
        name
        for name in names
        if not any(use.format(name.removesuffix(".py")) in tests for use in uses)
    } == set()
    assert {
        name
        for name in names
        if f"examples/{name}" not in (ROOT / "docs/python_api.md").read_text()
    } == set()


def test_own_prompts_on_two_ranks(quickstart_made: Path, tmp_path: Path) -> None:
    arguments = [
        "--quickstart",
        str(quickstart_made),
        "--steps",
        "2",
        "--output",
        str(tmp_path / "run"),
    ]
    output = run_example("own_prompts.py", arguments, world=2)
    assert step_lines(output) == ["step 1", "step 2"]
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()


def test_own_engine_agrees_with_vllm(quickstart_overrides: list[str], tmp_path: Path) -> None:
    """Check the accuracy at temperature 0 before training, and the log-probs of sampled tokens."""
    arguments = [*quickstart_overrides, *SHORT, *SMALL, "trainer.val_before_train=true"]
    own = tmp_path / "own"
    vllm = tmp_path / "vllm"
    output = run_example(
        "transformers_engine.py", [*arguments, f"trainer.default_local_dir={own}"], world=2
    )
    assert step_lines(output) == ["step 1", "step 2"]
    config = str(ROOT / "configs/quickstart.yaml")
    only = ["trainer.val_only=true", f"trainer.default_local_dir={vllm}"]
    done = forked.run(["-m", "rlhf_mc", config, *arguments, *only])
    assert done.returncode == 0, done.stderr[-2000:]
    validated = json.loads((vllm / "validation" / "step_000000.json").read_text())
    before, first, *_ = metrics(own)
    accuracies = {key: value for key, value in before.items() if key.startswith("val-core/")}
    assert accuracies and accuracies.items() <= validated.items()
    assert first["training/rollout_probs_diff_max"] < 1e-4


# ---------------------------------------------------------------- a reward function


@pytest.mark.parametrize(
    ("name", "response", "score", "acc"),
    [
        ("compute_score", "42", 1.0, 1.0),
        ("compute_score", "32", 0.5, 0.0),
        ("compute_score", "421", 2 / 3, 0.0),
        ("compute_score", "", 0.0, 0.0),
        ("TensFirst", "42", 1.0, 1.0),
        ("TensFirst", "49", 0.7, 0.0),
        ("TensFirst", "92", 0.3, 0.0),
        ("TensFirst", "", 0.0, 0.0),
    ],
)
def test_custom_rewards_score(name: str, response: str, score: float, acc: float) -> None:
    kwargs = {"tens": 0.7} if name == "TensFirst" else {}
    path = str(EXAMPLES / "custom_reward.py")
    reward = load_reward_function(
        CustomRewardFunctionConfig(path=path, name=name, reward_kwargs=kwargs)
    )
    found = reward.function("arithmetic", response, "42", extra_info={}, **reward.kwargs)
    assert (found["score"], found["acc"]) == (pytest.approx(score), acc)


def test_custom_reward(quickstart_overrides: list[str], tmp_path: Path) -> None:
    place = f"trainer.default_local_dir={tmp_path}"
    output = run_example("custom_reward.py", [*quickstart_overrides, *SHORT, *SMALL, place])
    assert step_lines(output) == ["step 1", "step 2"]
    for row in metrics(tmp_path):
        # The model of the quickstart knows the units' digit, and often forgets the carry.
        assert 0.3 <= row["critic/score/mean"] <= 1.0 and row["critic/score/max"] == pytest.approx(
            1.0
        )
        tens = row["reward_extra/arithmetic/tens"]
        assert row["critic/score/mean"] <= 0.7 * tens + 0.3 + 1e-6


# ---------------------------------------------------------------- an environment


AGENT = [
    "rollout.environment.name=openai",
    "rollout.environment.path=examples/guess_agent.py",
    "data.max_response_length=48",
]


def test_guess_number(quickstart_overrides: list[str], tmp_path: Path) -> None:
    """Check games of the quickstart's model, which knows numbers of two digits and no game. The
    agent's are those of the environment, token by token, and are exported as messages."""
    arguments = [*quickstart_overrides, *SHORT, *SMALL, "trainer.test_freq=2"]
    games = []
    for name, overrides in (("environment", []), ("agent", AGENT)):
        place = f"trainer.default_local_dir={tmp_path / name}"
        output = run_example("guess_number.py", [*arguments, *overrides, place])
        assert step_lines(output) == ["step 1", "step 2"]
        rows = metrics(tmp_path / name)
        for row in rows:
            assert 1 < row["num_turns/mean"] < row["num_turns/max"] == 4
            assert row["environment/failed_calls"] == 0
            if name == "environment" or row["response_length/clip_ratio"] == 0:
                # an agent whose game is cut off posts no number of guesses
                assert row["reward_extra/arithmetic/guesses_left"] == pytest.approx(
                    4 - row["num_turns/mean"]
                )
            assert row["response_length/mean"] <= 4 * row["num_turns/mean"]  # drawn tokens alone
            assert row["training/rollout_probs_diff_max"] < 1e-4
        assert "val-aux/arithmetic/guesses_left/mean@1" in rows[-1]
        assert 1 < rows[-1]["val-aux/num_turns/mean"] < rows[-1]["val-aux/num_turns/max"] == 4
        games.append(
            [
                (row["critic/score/mean"], row["response_length/mean"], row["num_turns/mean"])
                for row in rows
            ]
        )
    assert games[0] == games[1]
    sample = read_run(tmp_path / "agent").training[1][0]
    assert sample.prompt.endswith("=") and sample.turns[0] == (
        "observation",
        f"{sample.prompt}<|assistant|>",
    )
    output = tmp_path / "games.jsonl"
    export_conversations.export(tmp_path / "agent", None, -1.0, output)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines
    for line in lines:
        question, *rest = line["messages"]
        assert question["content"].endswith("=") and "tools" not in line
        assert {one["content"] for one in rest[1::2]} <= {
            "higher",
            "lower",
            "a number from 1 to 15",
        }
        assert {one["role"] for one in rest[::2]} == {"assistant"} and line["weights_step"] == 0


WRONG = "This is wrong. Try again."
CONVERSATIONS = [("It is 41.", WRONG, 0.0, False), ("so 42", "This is right.", 1.0, True)]


ROW = {
    "prompt": [{"role": "user", "content": "6 * 7"}],
    "ground_truth": "42",
    "extra_info": {},
    "agent_name": None,
}


def test_interaction_of_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check two conversations of one worker at a time, with the interaction loaded by its name."""
    monkeypatch.syspath_prepend(str(ROOT))
    kwargs = {"class_name": "examples.interaction.SecondChance"}
    pool = EnvironmentPool(EnvironmentConfig(path=str(EXAMPLES / "interaction.py"), kwargs=kwargs))
    try:
        for turn, (response, text, reward, done) in enumerate(CONVERSATIONS):
            for number in (0, 1):
                pool.submit(Turn((0, number), None if turn else ROW, response, []))
            answers = [*pool.take(60.0).values()]
            answers += pool.take(60.0).values() if len(answers) < 2 else []
            for answer in answers:
                assert isinstance(answer, StepResult), answer
                assert (answer.reward, answer.done) == (reward, done)
                assert done or answer.observation == [{"role": "user", "content": text}]
    finally:
        pool.close()


def _call(name: str, arguments: str) -> ToolCall:
    return ToolCall(name, json.dumps({"arguments": arguments}), "call00000")


FILES = {"files": {"a": "apple", "b c": "pear"}}
AGENTS: dict[str, tuple[dict[str, Any], list[Any], list[str], dict[str, float]]] = {
    "agent_loop.py": (
        {},
        ["42", "#### 42"],
        ["Give the answer after ####."],
        {"acc": 1.0, "answered/0": 0.0},
    ),
    "guess_agent.py": ({}, ["50", "42"], ["lower"], {"guesses_left": 2.0}),
    "shell_agent.py": (
        FILES,
        [_call("ls", ""), _call("cat", "'b c' d"), _call("cat", "'"), "42"],
        ["a\nb c", "cat: d: no such file\npear", "cat: ValueError('No closing quotation')"],
        {"calls": 3.0},
    ),
}


@pytest.mark.parametrize("name", [*AGENTS, "program"])
def test_agents(name: str) -> None:
    """Check the conversation of each agent, an agent loop of verl's among them, and of one as a
    program of its own."""
    place: dict[str, Any] = {"path": str(EXAMPLES / name)}
    if name == "program":
        name = "guess_agent.py"
        place = {"command": [sys.executable, str(EXAMPLES / name)]}
    extra_info, turns, contents, numbers = AGENTS[name]
    pool = EnvironmentPool(EnvironmentConfig(name="openai", **place))

    def answer(row: dict[str, Any] | None, text: str, calls: list[ToolCall]) -> StepResult:
        pool.submit(Turn((0, 0), row, text, [], calls, Completion("", [], 0, True, False)))
        (answered,) = pool.take(60.0).values()
        assert isinstance(answered, StepResult), answered
        return answered

    try:
        first = answer({**ROW, "extra_info": extra_info, "sampling": {}}, "", [])
        assert first.observation[-1] == ROW["prompt"][0]  # type: ignore[index]
        assert len(first.tools) == (2 if name == "shell_agent.py" else 0)
        for turn, content in zip(turns, [*contents, None], strict=True):
            is_call = isinstance(turn, ToolCall)
            last = answer(None, "" if is_call else turn, [turn] if is_call else [])
            assert last.done == (content is None)
            if content is not None:
                assert last.observation[0]["content"] == content  # type: ignore[index,call-overload]
        assert last.reward == 1.0 and numbers.items() <= last.info.items()
    finally:
        pool.close()


# ---------------------------------------------------------------- an advantage estimator


def test_custom_estimator_by_hand() -> None:
    scores = torch.tensor([3.0, 1.0, 1.0, 7.0, 7.0, 9.0])
    lens = torch.tensor([2, 2, 2, 2, 2, 1])
    inputs = EstimatorInputs(torch.zeros(11), lens, scores, torch.tensor([0, 0, 0, 1, 1, 1]))
    estimate = load_example("custom_estimator.py").estimate
    wanted = torch.tensor([1, 1, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5, -0.5, 1])
    torch.testing.assert_close(estimate(inputs).advantages, wanted)


def test_custom_estimator(quickstart_overrides: list[str], tmp_path: Path) -> None:
    place = f"trainer.default_local_dir={tmp_path}"
    output = run_example("custom_estimator.py", [*quickstart_overrides, *SHORT, *SMALL, place])
    assert step_lines(output) == ["step 1", "step 2"]
    rows = metrics(tmp_path)
    bounds = [
        bound
        for row in rows
        for bound in (row["critic/advantages/max"], -row["critic/advantages/min"])
    ]
    assert max(bounds) > 0  # a prompt may have four equal scores
    for bound in bounds:  # sums of 3 signs, divided by 3
        assert 0 <= bound <= 1 and bound * 3 == pytest.approx(round(bound * 3), abs=1e-5)
    assert not any("critic/vf_loss" in row for row in rows)


# ---------------------------------------------------------------- GRPO on GSM8K


def run_gsm8k(tmp_path: Path, model: Path, further: list[str]) -> None:
    """Run grpo_gsm8k.py with further settings."""
    (tmp_path / "gsm8k_train.jsonl").write_text("\n".join(gsm8k_lines(16)), encoding="utf-8")
    (tmp_path / "gsm8k_test.jsonl").write_text("\n".join(gsm8k_lines(4)), encoding="utf-8")
    prepare = ["--dataset", "gsm8k", "--input", str(tmp_path), "--output", str(tmp_path / "data")]
    done = forked.run([str(ROOT / "tools" / "prepare_data.py"), *prepare])
    assert done.returncode == 0, done.stderr
    settings = [
        "data.train_batch_size=4",
        "data.max_prompt_length=1000",  # its tokenizer has a token for each character
        "actor.ppo_mini_batch_size=2",
        "actor.megatron.dtype=float32",
        "trainer.total_training_steps=2",
        "trainer.test_freq=1",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        *further,
    ]
    output = run_example(
        "grpo_gsm8k.py", ["--model", str(model), "--data", str(tmp_path / "data"), *settings]
    )
    assert step_lines(output) == ["step 1", "step 2"]


# ---------------------------------------------------------------- tools


def tool_file(name: str) -> str:
    """Return the path of examples/NAME, a file of functions."""
    return str(EXAMPLES / name)


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("3 * (4 + 5)", "27"),
        ("-1,200 / 8", "-150"),
        ("2**0.5", "1.4142135623731"),
        ("9**9**9", "an exponent is at most 100"),
        ("__import__('os')", "is no arithmetic"),
        ("1e30 * 10", "too large"),
        ("2 +", "invalid syntax"),
    ],
)
def test_calculator(expression: str, answer: str) -> None:
    found = load_example("calculator.py").calculate(expression)
    assert found == answer or (found.startswith("Error: ") and answer in found)


TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{% if m.role == "
    "'assistant' %}<|bot|>{{ m.content }}{{ m.tool_calls or '' }}<|end|>{% else %}<|user|>{{ "
    "m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)
TURNS = [
    "data.max_prompt_length=1800",
    "data.max_response_length=200",
    "rollout.environment.max_turns=3",
    "rollout.environment.max_parallel_calls=2",
    "rollout.environment.max_tokens_per_turn=2",
]
CALLS = [
    f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
    for expression in ("6 * 7", "1 / 0")
]


def test_calculator_on_gsm8k(tmp_path: Path) -> None:
    """Check a model whose vocabulary has whole calls as tokens, which it draws most of the time."""
    model = make_checkpoint(
        tmp_path / "model", tied=False, max_position_embeddings=2048, vocab_size=272
    )
    tokenizer = AutoTokenizer.from_pretrained(model, chat_template=TOOL_TEMPLATE)
    tokenizer.add_tokens(CALLS)
    tokenizer.save_pretrained(model)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] *= 0.1
    weights["lm_head.weight"][tokenizer.convert_tokens_to_ids(CALLS)] *= 100.0
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    run_gsm8k(
        tmp_path,
        model,
        [f"rollout.environment.function_tool_path={tool_file('calculator.py')}", *TURNS],
    )
    before, *rows = metrics(tmp_path / "run")
    assert before["val-core/openai/gsm8k/acc/mean@1"] == 0.0  # random weights
    assert rows[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    for row in rows:
        assert row["actor/skipped"] == 0.0 and "critic/vf_loss" not in row
        assert row["num_turns/mean"] > 1 and row["num_turns/max"] == 3
        assert (
            row["reward_extra/openai/gsm8k/tool_calls"]
            > row["reward_extra/openai/gsm8k/invalid_calls"]
            == 0.0
        )
        assert (
            row["reward/openai/gsm8k/environment"]
            == row["reward/openai/gsm8k/gsm8k_strict"]
            == row["critic/score/mean"]
            == 0.0
        )
        assert row["prompt_length/mean"] > 400  # with the tool's schema
        assert row["training/rollout_probs_diff_max"] < 1e-4
        assert row["environment/failed_calls"] == 0.0  # a division by zero is the model's mistake
    texts = "".join(path.read_text() for path in (tmp_path / "run" / "train_generations").iterdir())
    for answer in ("</tool_call>42", "Error: division by zero"):
        assert answer in texts
    for row in map(json.loads, texts.splitlines()):
        tokens = zip(row["tokens"]["text"], row["tokens"]["response_mask"], strict=True)
        observed = [text for kind, text in row["turns"] if kind == "observation"]
        assert "".join(text for text, is_drawn in tokens if not is_drawn) == "".join(observed)


TOOL_CONFIG = """
tools:
  - class_name: examples.search_tool.Search
    config: {{path: {directory}/passages.parquet, column: text, num_results: 1}}
  - class_name: examples.mcp_tool.MCPTool
    config: {{command: {python}, args: [{directory}/server.py], tool: weather}}
"""
SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("weather")

@server.tool()
def weather(city: str) -> str:
    "Say what the weather is."
    if city != "Oslo":
        raise ValueError(f"no city {city}")
    return f"rain in {city}"

server.run()
"""
PROGRAMS = {
    "print(6 * 7)": "42\n",
    "import os; print(os.listdir('/tmp'), open('/usr/new', 'w'))": "Read-only file system",
    "import socket; socket.create_connection(('1.1.1.1', 80))": "Network is unreachable",
    "x = bytearray(2 << 30)": "MemoryError",
    "while True: print('x' * 1000)": "xxx...(truncated)...xxx",
    # A remount by the system call: the process has no capabilities.
    "import ctypes; print(ctypes.CDLL(None).mount(b'none', b'/usr', None, 0x1020, None))": "-1\n",
}


def test_tools_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the interpreter, the search and an MCP server, with the tools of both kinds of
    files."""
    monkeypatch.syspath_prepend(str(ROOT))
    texts = [
        "The Nile is a river in Africa.",
        "A river, a river, and a bridge.",
        "Oslo is the capital of Norway.",
    ]
    pq.write_table(pa.table({"text": texts}), tmp_path / "passages.parquet")
    (tmp_path / "server.py").write_text(SERVER)
    config = tmp_path / "tools.yaml"
    config.write_text(TOOL_CONFIG.format(directory=tmp_path, python=sys.executable))
    cfg = EnvironmentConfig(
        function_tool_path=tool_file("python_tool.py"),
        tool_config_path=str(config),
        timeout_seconds=60.0,
        max_parallel_calls=20,
        max_observation_length=2000,
    )
    others = {
        ("search", "query", "a river in Africa"): "(1) The Nile is",
        ("search", "query", "nothing like that"): "nothing was found",
        ("weather", "city", "Oslo"): "rain in Oslo",
        ("weather", "city", "Rome"): "Error: raised RuntimeError: Error executing tool weather",
    }
    wanted = {("python", "code", program): answer for program, answer in PROGRAMS.items()} | others
    calls = [ToolCall(name, json.dumps({key: value}), "1") for name, key, value in wanted]
    row = {"prompt": [], "extra_info": {}, "agent_name": None}
    pool = EnvironmentPool(cfg)
    try:
        assert [one["function"]["name"] for one in pool.tool_schemas] == [
            "python",
            "search",
            "weather",
        ]
        pool.submit(Turn((0, 0), row, "", [], calls))
        (answer,) = pool.take(60.0).values()
    finally:
        pool.close()
    assert isinstance(answer, StepResult)
    for message, part in zip(answer.observation, wanted.values(), strict=True):
        assert isinstance(message, dict) and part in message["content"]
    assert sorted(one.kind for one in answer.failures) == ["raised"]


# ---------------------------------------------------------------- a reward model

TARGET_KL = 0.1
EPOCH = 5


def held_out_accuracy(reward_model: Path, questions: Path) -> float:
    """Return the share of random pairs of two-digit answers, one for each question, whose larger
    answer the reward model scores higher. It is transformers' model, on tokens that are put
    together here."""
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32)
    rng = random.Random(99)
    answers = []
    texts = []
    for row in pq.read_table(questions).to_pylist():
        pair = rng.sample(range(10, 100), 2)
        answers.append(pair)
        texts += [
            f"<|user|>{row['prompt'][0]['content']}<|assistant|>{answer}<|end|>" for answer in pair
        ]
    with torch.no_grad():
        scores = model(
            torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])
        ).logits.view(-1, 2)
    numbers = torch.tensor(answers)
    return float(((scores[:, 0] > scores[:, 1]) == (numbers[:, 0] > numbers[:, 1])).float().mean())


@pytest.fixture(scope="module")
def reward_model_run(quickstart_made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of examples/reward_model.py with 20 steps of PPO."""
    out = tmp_path_factory.mktemp("reward_model")
    output = run_example(
        "reward_model.py",
        ["--quickstart", str(quickstart_made), "--output", str(out), "--steps=20"],
    )
    epochs = ["steps 1 to 5", "steps 6 to 10", "steps 11 to 15", "steps 16 to 20"]
    assert [line.partition(":")[0] for line in output if line.startswith("steps ")] == epochs
    return out


def test_reward_model_prefers_the_larger_answer(
    reward_model_run: Path, quickstart_made: Path
) -> None:
    assert held_out_accuracy(reward_model_run / "model", quickstart_made / "val.parquet") > 0.9


def test_reward_model_score_rises_at_the_target_kl(reward_model_run: Path) -> None:
    """Check bounds that follow from the runs in docs/results.md."""
    rows = [row for row in metrics(reward_model_run / "ppo") if "critic/score/mean" in row]
    scores = [row["critic/score/mean"] for row in rows]
    kls = [row["actor/reward_kl_penalty"] for row in rows]
    assert max(map(abs, kls[:EPOCH])) < 1e-4  # the actor is not updated yet
    assert fmean(scores[-EPOCH:]) - fmean(scores[:EPOCH]) > 0.25
    assert TARGET_KL / 2 < fmean(kls[-EPOCH:]) < TARGET_KL * 2
    coefficients = [row["actor/reward_kl_penalty_coeff"] for row in rows]
    for kl, before, after in zip(kls, coefficients, coefficients[1:], strict=False):
        error = min(max(kl / TARGET_KL - 1.0, -0.2), 0.2)
        # sequences of a step / horizon
        assert after == pytest.approx(before * (1.0 + error * 256 / 500))


def test_reward_model_on_two_ranks(
    reward_model_run: Path, quickstart_made: Path, tmp_path: Path
) -> None:
    arguments = ["--quickstart", str(quickstart_made), "--output", str(tmp_path), "--steps", "1"]
    done = forked.run_ranks(2, [str(EXAMPLES / "reward_model.py"), *arguments])
    assert (
        done.returncode != 0 and "error: --reward-model is needed on several ranks" in done.stderr
    )
    run_example(
        "reward_model.py", [*arguments, "--reward-model", str(reward_model_run / "model")], world=2
    )
    first = [
        metrics(directory / "ppo")[1]["critic/score/mean"]
        for directory in (reward_model_run, tmp_path)
    ]
    assert first[1] == pytest.approx(first[0], abs=1e-4)  # the same responses as on one rank
