"""The search for settings: its choices fit, are in order, and load again from the config that it
writes."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from documents import ROOT
from published import model_path

from rlhf_mc.config.load import read_settings
from rlhf_mc.planner import search as search_module
from rlhf_mc.planner.__main__ import main
from rlhf_mc.planner.gpus import GPUS, Machine
from rlhf_mc.planner.lengths import Lengths
from rlhf_mc.planner.search import EQUAL, MARGIN, search
from rlhf_mc.planner.start import Capacity

SMALL = "configs/ppo_qwen2.5_0.5b.yaml"
MODELS = {"configs/ppo_70b.yaml": "llama-3-70b", SMALL: "qwen2.5-0.5b"}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs the command with the published model: (code, output, errors)."""

    def call(config: str, *arguments: str) -> tuple[int, str, str]:
        code = main([str(ROOT / config), "--model", MODELS[config], *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "machine", "changes"),
    [
        ("configs/ppo_70b.yaml", ["--nodes", "8"], []),
        (SMALL, ["--gpus-per-node", "1", "--gpu", "a100"], ["rollout.n=4"]),
    ],
)
def test_written_config_is_the_users_and_fits(
    run: Any, tmp_path: Path, config: str, machine: list[str], changes: list[str]
) -> None:
    path = tmp_path / "best.yaml"
    code, out, _ = run(
        config, *machine, *changes, "--search", "--top", "3", "--json", "--write", str(path)
    )
    assert code == 0
    choices = json.loads(out)
    best = choices[0]
    assert len({json.dumps(choice["settings"]) for choice in choices}) == 3
    quickest = min(choice["times"]["step_seconds"] for choice in choices)
    assert quickest <= best["times"]["step_seconds"] <= quickest * (1 + EQUAL)
    # The layout that was written by hand is one of those searched for.
    _, out, _ = run(config, *machine, *changes, "--json")
    assert best["times"]["step_seconds"] < json.loads(out)["times"]["step_seconds"] * (1 + EQUAL)
    for choice in choices:
        assert choice["spare_bytes"] > 0.9 * MARGIN * (80 << 30)
        assert choice["settings"]["actor.megatron.tensor_model_parallel_size"] <= 8
        assert choice["settings"]["rollout.tensor_model_parallel_size"] <= 8

    # All that the user has set is kept, unless it was searched for.
    assert path.read_text().startswith("# Written by: python -m rlhf_mc.planner ")
    users = read_settings(ROOT / config, changes)
    assert read_settings(path) == {**users, **best["settings"]}

    # The command plans the written config as the search did.
    assert main([str(path), *machine, "--model", MODELS[config], "--json"]) == 0


def test_table(run: Any) -> None:
    code, out, _ = run(SMALL, "--gpus-per-node", "1", "--search", "--top", "3")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("plans that fit, by the lower bound of a step with prompts of 512")
    assert lines[1].split()[:5] == ["rank", "step", "s", "tokens/s/GPU", "expected"]
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "3", "expected:"]
    assert lines[-1].startswith("expected: extrapolated, the factors of one H200, Qwen2.5-0.5B")


@pytest.mark.slow
def test_no_plan_fits(run: Any) -> None:
    code, _, err = run("configs/ppo_70b.yaml", "--search")
    assert code == 2
    assert "no settings fit 8 GPUs of 85.9 GB, if 5% stay free; use more GPUs" in err
    code, _, err = run(SMALL, "--gpus-per-node", "1", "--search", "--host-memory", "2e9")
    assert code == 2
    assert "no settings fit 1 GPUs of 85.9 GB and the host memory of their nodes" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--search", "--gpu", "80e9"],
            "--search ranks by times, and --gpu 80e9 has none; name one of a100, h100",
        ),
        (["--write", "best.yaml"], "--write is for the config that --search finds; add --search"),
        (
            ["--search", "--nodes", "8", "actor.ppo_mini_batch_size=250"],
            "actor.ppo_mini_batch_size is 250",
        ),
        (
            ["--search", "--nodes", "8", "--write", "nowhere/best.yaml"],
            "no directory nowhere; create it",
        ),
    ],
)
def test_bad_input_is_one_line(run: Any, arguments: list[str], words: str) -> None:
    code, _, err = run("configs/ppo_70b.yaml", *arguments)
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("rlhf_mc: error: ") and words in line


def test_existing_file_is_not_replaced(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    code, _, err = run(SMALL, "--gpus-per-node", "1", "--search", "--write", str(path))
    assert code == 2 and err.strip().endswith(
        f"--write: {path} exists; name a new file, or remove it"
    )
    assert path.read_text() == "mine"


@pytest.mark.slow
def test_less_memory_takes_more_of_what_saves_it() -> None:
    """Search for two nodes of one GPU each: over both nodes tensor parallelism is used only if
    nothing else fits."""
    settings = read_settings(ROOT / SMALL, [model_path("qwen2.5-0.5b")])
    rates = GPUS["h100"].rates
    assert rates is not None
    found = []
    for device_bytes in (80e9, 16e9, 11.5e9, 11.1e9):
        capacity = Capacity(2, int(device_bytes), ranks_per_node=1)
        (best,) = search(settings, Machine(2, 1, rates, 50e9), capacity, Lengths(512, 512), top=1)
        megatron = best.cfg.actor.megatron
        found.append(
            (megatron.tensor_model_parallel_size, best.offload, megatron.recompute_granularity)
        )
    # Offload: 0 none, 1 of vLLM, 2 gradients, 3 optimizer state, 4 weights.
    assert found == [(1, 0, None), (1, 3, None), (2, 3, None), (2, 4, None)]


@pytest.mark.slow
def test_the_memory_is_planned_for_the_nodes_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Search for two nodes of one GPU each: the groups of an engine, and what a GPU exchanges with
    others of its node, depend on that."""
    plan_memory = search_module.plan_memory
    ranks_per_node = set()

    def plan(cfg: Any, shapes: Any, capacity: Capacity, *more: Any) -> Any:
        ranks_per_node.add(capacity.ranks_per_node)
        return plan_memory(cfg, shapes, capacity, *more)

    monkeypatch.setattr(search_module, "plan_memory", plan)
    settings = read_settings(ROOT / SMALL, [model_path("qwen2.5-0.5b")])
    rates = GPUS["h100"].rates
    assert rates is not None
    capacity = Capacity(2, 80 << 30, ranks_per_node=1)
    search(settings, Machine(2, 1, rates, 50e9), capacity, Lengths(512, 512), top=1)
    assert ranks_per_node == {1}


@pytest.mark.slow
def test_a_slow_machine_finds_the_same(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an hour pass between two looks at the clock."""
    arguments = (SMALL, "--search", "--top", "3", "--json")
    code, out, err = run(*arguments)
    clock = SimpleNamespace(monotonic=itertools.count(step=3600).__next__)
    monkeypatch.setattr(search_module, "time", clock)
    slow_code, slow_out, slow_err = run(*arguments)
    assert (code, out) == (slow_code, slow_out) and len(json.loads(out)) == 3
    assert slow_err.count("rlhf_mc: search: ") > err.count("rlhf_mc: search: ")
    assert re.fullmatch(r"rlhf_mc: search: \d+ layouts looked at", slow_err.splitlines()[0])


@pytest.mark.slow
def test_a_search_ends_after_its_budget(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "BUDGET", 20)
    code, out, err = run(SMALL, "--search", "--top", "3", "--json")
    assert code == 0 and 0 < len(json.loads(out)) <= 3
    assert err.splitlines()[-1] == (
        "rlhf_mc: the search ended after 20 settings; with fewer GPUs it would compare all"
    )
    monkeypatch.setattr(search_module, "BUDGET", 0)
    code, out, err = run(SMALL, "--search")
    assert (code, out) == (2, "")
    assert "rlhf_mc: error: no settings fit 8 GPUs of 85.9 GB" in err


def test_splits_of_the_ranks_are_compared(run: Any) -> None:
    """Search on four GPUs: the choices have splits of their own and none, and each is checked as a
    run of the command is."""
    pools = ("resource_pools.train=2", "resource_pools.rollout=2", "rollout.one_step_off=true")
    correction = "algorithm.rollout_correction.rollout_is=token"
    machine = ("--gpus-per-node", "4", "--gpu", "a100")
    arguments = (*machine, *pools, correction)
    code, out, errors = run(SMALL, *arguments, "--search", "--top", "40", "--json")
    assert code == 0
    found = set()
    for choice in json.loads(out):
        settings = choice["settings"]
        found.add((settings["resource_pools.train"], settings["resource_pools.rollout"]))
    assert len(found) > 1 and found <= {(None, None), (1, 3), (2, 2), (3, 1)}
    line = next(line for line in errors.splitlines() if "the best step of each split" in line)
    assert all(f"{split} ranks" in line for split in ("4", "3 + 1", "2 + 2", "1 + 3"))
    kl = ("algorithm.use_kl_in_reward=true", "ref.pool=rollout")
    code, out, errors = run(SMALL, *arguments, *kl, "--search", "--json")
    assert code == 0
    splits = {choice["settings"]["resource_pools.train"] for choice in json.loads(out)}
    assert None not in splits, "a reference in the rollout pool needs one"
