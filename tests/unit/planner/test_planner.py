"""The planner's command: verdicts and their advice, for the shipped configs at full size. No
weights are needed."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, joined
from published import CONFIGS, PLAN_70B

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.load import load_config
from rlhf_mc.config.schema import MegatronConfig
from rlhf_mc.planner import activations
from rlhf_mc.planner.__main__ import main
from rlhf_mc.planner.published import MODELS, PUBLISHED, with_model
from rlhf_mc.planner.rank_layouts import own_rollout_weights
from rlhf_mc.reshard.layout import logical_shapes
from rlhf_mc.rollout.vllm_layout import vllm_layout
from rlhf_mc.topology.mesh import Mesh

GB = 10**9


PLAN_SMALL = [
    str(ROOT / "configs/ppo_qwen2.5_0.5b.yaml"),
    "--model",
    "qwen2.5-0.5b",
    "--gpus-per-node",
    "1",
]


def test_70b_fits_as_its_config_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Compare with the figures in the config's comments."""
    assert main([*PLAN_70B, "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert plan["fits"] and [len(ranks["ranks"]) for ranks in plan["ranks"]] == [16] * 4
    first = plan["ranks"][0]
    update = first["phases"]["update_actor"]
    state = sum(update[f"actor {part}"] for part in ("params", "grads", "optimizer"))
    assert state / GB == pytest.approx(27.2, abs=0.1)
    assert update["activations"] / GB == pytest.approx(28.5, abs=0.6)
    assert set(update) == {
        "actor params",
        "actor grads",
        "actor optimizer",
        "activations",
        "reserved",
    }
    assert first["rollout"]["weights"] / GB == pytest.approx(17.6, abs=0.1)
    assert first["rollout"]["kv_bytes_per_token"] == 2 * 80 * 128 * 2  # one of 8 KV heads
    assert set(first["phases"]["gen"]) == {"vLLM", "reserved"}


def test_replayed_experts_take_a_byte_for_each_choice(capsys: pytest.CaptureFixture[str]) -> None:
    """Check 128 of 512 prompts in an update, on 8 replicas of a stage of 24 layers with 8 experts a
    token."""
    config = [
        str(ROOT / "configs/ppo_qwen3_30b_a3b.yaml"),
        "--model",
        "qwen3-30b-a3b",
        "--nodes",
        "2",
        "--json",
    ]
    for mode, rows in (("rollout", 1), ("off", 0)):
        assert main([*config, f"algorithm.router_replay={mode}"]) == 0
        phases = json.loads(capsys.readouterr().out)["ranks"][0]["phases"]
        for phase, sequences in {"old_log_prob": 64, "update_actor": 16}.items():
            assert phases[phase].get("replayed experts", 0) == rows * sequences * 3072 * 24 * 8
        assert not {"replayed experts"} & {*phases["ref"], *phases["update_critic"]}


@pytest.mark.parametrize(
    ("overrides", "problem", "advice"),
    [
        (
            ["actor.ppo_max_token_len_per_gpu=32768"],
            "phase update_actor on ranks 0 to 15 takes",
            "actor.megatron.recompute_granularity=selective",
        ),
        (
            ["rollout.gpu_memory_utilization=0.2"],
            "leave 0.00 for keys and values",
            "rollout.gpu_memory_utilization=0.3",
        ),
        (
            ["rollout.gpu_memory_utilization=1.0"],
            "phase gen on ranks 0 to 15",
            "rollout.gpu_memory_utilization=0.9",
        ),
        (
            ["rollout.free_cache_engine=false"],
            "largest part is vLLM",
            "rollout.free_cache_engine=true",
        ),
    ],
)
def test_advice_makes_it_fit(
    capsys: pytest.CaptureFixture[str], overrides: list[str], problem: str, advice: str
) -> None:
    """Check the one line on standard error, and that the settings it names do make the run fit."""
    assert main([*PLAN_70B, *overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlhf_mc: error: does not fit: ") and problem in line
    _, _, settings = line.partition("it fits with ")
    assert advice in settings
    assert main([*PLAN_70B, *overrides, *settings.split()]) == 0


def test_routers_that_vllm_has_in_float32() -> None:
    shape = ModelShape.from_hf_config(CONFIGS["glm-4.5-air"])
    mesh = Mesh(1, 1, 1)
    own = own_rollout_weights(
        shape, mesh, mesh.coordinate(0), 0, 1, vllm_layout, "bfloat16", False, True
    )
    layer = "model.layers.1"
    assert (
        own[f"{layer}.mlp.gate.weight"] == 4 * 128 * 4096
        and own[f"{layer}.input_layernorm.weight"] == 2 * 4096
    )
    assert own[f"{layer}.mlp.gate.e_score_correction_bias"] == 4 * 128


def test_host_memory_and_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    """Compare with the figures in the config's comments."""
    assert main([*PLAN_70B, "--json", "--host-memory", "1e12", "--storage-bandwidth", "10e9"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    parts = plan["host_memory"]["parts"]
    offloads = sum(size for name, size in parts.items() if name.endswith((" params", " optimizer")))
    assert offloads / GB == pytest.approx(8 * 40, rel=0.03)
    assert parts["asynchronous save"] / GB == pytest.approx(8 * 31.8, rel=0.01)
    assert parts["export"] == 40 * GB  # 8 files of 5 GB
    storage = plan["storage"]
    assert (
        storage["checkpoint"] / GB == pytest.approx(2 * 70.6 * 14, rel=0.01)
        and storage["checkpoints"] == 3
    )
    assert storage["space"] == 3 * storage["checkpoint"] + storage["export"]
    assert storage["save"] == storage["checkpoint"] / 8 / 10e9 < storage["load"]
    partial = ["rollout.partial_rollout=true", "algorithm.rollout_correction.rollout_is=token"]
    assert (
        main(
            [*PLAN_70B, *partial, "--json", "--host-memory", "1e12", "--storage-bandwidth", "10e9"]
        )
        == 0
    )
    larger = json.loads(capsys.readouterr().out)["storage"]
    pool = larger["checkpoint"] - storage["checkpoint"]
    assert pool == 1024 * 2048 * 8, (
        "one batch is kept, of the longest responses: a token and a log-prob are 8 bytes"
    )
    assert larger["save"] - storage["save"] == pytest.approx(pool / 10e9)


def test_host_memory_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN_70B, "--host-memory", "600e9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "GB of host memory of 600; the largest part is asynchronous save" in line
    assert line.endswith("it fits with trainer.async_save=false")
    assert main([*PLAN_70B, "--host-memory", "600e9", "trainer.async_save=false"]) == 0


def test_no_settings_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN_70B, "--gpu", "16e9"]) == 2
    assert (
        capsys.readouterr()
        .err.strip()
        .endswith("use more GPUs, or larger tensor- or pipeline-parallel sizes")
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "v100"], ("--gpu is 'v100'", "h100")),
        (["--gpu", "80"], ("--gpu is '80'", "80e9")),
        (["--nodes", "3"], ("does not divide the 24 processes",)),
        (["actor.megatron.pipeline_model_parallel_size=3"], ("pipeline_model_parallel_size",)),
        (
            ["--model", "Llama-3-7b"],
            (
                "--model is 'Llama-3-7b' (near: llama-3-70b, llama-3-8b); ",
                "qwen2.5-0.5b, qwen2.5-32b",
            ),
        ),
        (
            ["--model", "configs"],
            ("--model is 'configs'; it must be a directory with config.json",),
        ),
        (
            ["critic.model_path=nowhere"],
            ("critic.model_path: nowhere/config.json", "give critic.model_path=DIRECTORY"),
        ),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: tuple[str, ...]
) -> None:
    assert main([*PLAN_70B, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlhf_mc: error: ")
    for word in words:
        assert word in line


def test_table_of_one_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN_SMALL, "--gpu", "a100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 0, GB of 85.9 on each device:"
    assert any(line.startswith("  update_actor") for line in lines)
    assert lines[-1].startswith("fits: the fullest phase is ")


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (
            "trainer.save_freq=-1",
            "no training checkpoints (trainer.save_freq, save_minutes); an export has 1.0 GB",
        ),
        ("trainer.max_ckpt_to_keep=null", "every save adds one"),
        ("trainer.max_ckpt_to_keep=1", "2 of them and an export take 28."),
        ("trainer.max_ckpt_to_keep=1 trainer.save_minutes=30", "3 of them and an export take 42."),
    ],
)
def test_checkpoints_of_one_gpu(
    capsys: pytest.CaptureFixture[str], setting: str, text: str
) -> None:
    keeps = ["trainer.max_ckpt_to_keep=null"] if "save_freq" in setting else []
    assert main([*PLAN_SMALL, *keeps, *setting.split()]) == 0
    out = capsys.readouterr().out
    assert text in out
    assert "traffic: none, there is one rank" in out


@pytest.mark.slow
def test_documented_commands_plan_without_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the commands of README, docs and the comments of the configs that name a published
    model."""
    monkeypatch.chdir(ROOT)
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("configs/*.yaml")]
    texts = [re.sub(r"\n# ", " ", page.read_text()) for page in pages]
    commands = {
        found
        for text in texts
        for found in re.findall(r"rlhf_mc\.planner (configs/[^`\n]+ --model [^`\n]+)", text)
    }
    assert len(commands) >= 6
    for command in commands:
        assert main(shlex.split(command)) == 0, (command, capsys.readouterr().err)


def test_figures_of_the_gsm8k_page_are_the_planners(capsys: pytest.CaptureFixture[str]) -> None:
    page = joined((ROOT / "docs/gsm8k.md").read_text())
    (command,) = re.findall(r"rlhf_mc\.planner (configs/.*)", page)
    assert main([*shlex.split(command), "--model", "qwen2.5-0.5b", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (ranks,) = plan["ranks"]
    update = ranks["phases"]["update_actor"]
    seconds = plan["times"]["step_seconds"]
    for text in (
        f"{sum(update.values()) / GB:.1f} of 85.9 GB",
        f"{update['activations'] / GB:.1f} of activations, {update['vLLM'] / GB:.1f} of vLLM",
        f"| host memory | {sum(plan['host_memory']['parts'].values()) / GB:.0f} GB |",
        (
            f"{plan['storage']['checkpoint'] / GB:.1f} GB, three of them and an export "
            f"{plan['storage']['space'] / GB:.1f}"
        ),
        f"at least {seconds:.1f} s",
    ):
        assert text in page


def test_the_missing_model_of_a_config_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([PLAN_70B[0], "--nodes", "8"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "rlhf_mc: error: model.path: models/Meta-Llama-3-70B-Instruct/config.json cannot be read; "
    )
    assert "--model" in line and "llama-3-70b" in line


@pytest.mark.parametrize("given", ["directory", "config.json", "LLAMA-3-70b"])
def test_model_may_be_a_directory_a_file_or_a_name(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-3-70b"]))
    model = {"directory": str(tmp_path), "config.json": str(tmp_path / "config.json")}.get(
        given, given
    )
    assert main([PLAN_70B[0], "--model", model, "--nodes", "8"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("leaves 21.8 GB of each device")


def test_roles_with_the_actors_path_follow_the_model() -> None:
    """Check that a critic that names the actor's directory is replaced too, and one with its own is
    not."""
    same = [
        "model.path=models/A",
        "critic.model_path=models/A/",
        f"reward_model.model_path={MODELS / 'qwen2.5-7b'}",
    ]
    cfg = load_config(PLAN_70B[0], with_model(PLAN_70B[0], same, "qwen2.5-32b"))
    assert cfg.model.path == cfg.critic.model_path == str(MODELS / "qwen2.5-32b")
    assert cfg.reward_model.model_path == str(MODELS / "qwen2.5-7b")


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3-70b", 70.55),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-7b", 7.616),
        ("qwen2.5-32b", 32.764),
        ("qwen3-30b-a3b", 30.53),
        ("mixtral-8x22b", 140.63),
        ("glm-4.5", 352.8),
        ("glm-4.5-air", 106.85),
        ("gpt-oss-120b", 116.83),
        ("gpt-oss-20b", 20.91),
        ("deepseek-v3", 671.03),
        ("kimi-k2", 1026.4),
        ("moonlight-16b-a3b", 15.96),
        ("qwen3-next-80b-a3b", 79.67),
    ],
)
def test_published_models_have_their_published_size(name: str, billions: float) -> None:
    shape = ModelShape.from_hf_config(CONFIGS[name])
    assert sum(map(math.prod, logical_shapes(shape).values())) / 1e9 == pytest.approx(
        billions, rel=1e-3
    )


def test_every_published_model_is_in_the_wheel() -> None:
    assert '"rlhf_mc.planner": ["models/*/config.json"]' in (ROOT / "setup.py").read_text()
    assert {path.name for path in MODELS.iterdir()} == set(PUBLISHED)


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, rlhf_mc.planner.__main__; assert not {'torch', 'numpy', 'vllm'} & "
        "set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def reserved(plan: dict[str, Any]) -> tuple[float, float]:
    """Return the reserved GB of the first ranks in an update and in generation."""
    phases = plan["ranks"][0]["phases"]
    return phases["update_actor"]["reserved"] / GB, phases["gen"]["reserved"] / GB


@pytest.mark.parametrize(
    ("config", "model", "nodes", "gib", "communicators", "peers"),
    [
        ("ppo_qwen2.5_0.5b", "qwen2.5-0.5b", 1, 0, 1, 0),  # world, which is the replicas
        # tensor, pipeline and data parallel, world
        ("ppo_70b", "llama-3-70b", 8, 394 / 1024, 4, 0),
        ("ppo_qwen3_30b_a3b", "qwen3-30b-a3b", 2, 394 / 1024, 3, 7),  # stages, experts, world
        # tensor parallel, 2 and 4 context-parallel, world
        ("grpo_qwen3_8b_32k", "qwen3-8b", 1, 394 / 1024, 4, 0),
    ],
)
def test_reserved_memory_has_a_part_for_each_communicator(
    config: str,
    model: str,
    nodes: int,
    gib: float,
    communicators: int,
    peers: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """gib: of the engine's workspace, where the engine sleeps during the update."""
    assert (
        main(
            [
                str(ROOT / f"configs/{config}.yaml"),
                "--model",
                model,
                "--nodes",
                str(nodes),
                "--json",
            ]
        )
        == 0
    )
    update, gen = reserved(json.loads(capsys.readouterr().out))
    assert gen == pytest.approx(
        (900 + 1024 + 384 * communicators) * 2**20 / GB + 0.35 + 0.47 * peers, abs=0.001
    )
    asleep = 384 / 1024 + gib if gib else 0  # rollout TP > 1: a communicator too
    assert update - gen == pytest.approx(asleep * 2**30 / GB, abs=0.001)


def test_float32_attention_on_a_gpu_stores_repeated_keys_and_values() -> None:
    """Compare with bfloat16, which is half as large but for numbers in float32 in both."""
    shape = ModelShape.from_hf_config(CONFIGS["llama-3-70b"])
    layer = shape.layers[0]
    narrow, wide = (
        activations.Activations(shape, MegatronConfig(dtype=dtype), True).layer_bytes(layer).stored
        for dtype in ("bfloat16", "float32")
    )
    in_float32 = 4 * (64 + 2)
    assert wide - in_float32 == 2 * (narrow - in_float32) + 8 * (64 - 8) * 128


def test_teachers_are_counted_in_phases_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Compare a teacher of 7.6 billion parameters, TP 4, with the sizes of its weights and of its
    tokens."""
    role = "distillation.teacher_models.t"
    plan = [
        PLAN_SMALL[0],
        *PLAN_SMALL[1:3],
        "--gpus-per-node",
        "4",
        "--json",
        "distillation.enabled=true",
        "distillation.distillation_loss.loss_mode=forward_kl_topk",
        "distillation.distillation_loss.topk=20",
        f"{role}.model_path={MODELS / 'qwen2.5-7b'}",
        f"{role}.megatron.tensor_model_parallel_size=4",
        f"{role}.megatron.param_offload=true",
    ]
    assert main(plan) == 0
    found = json.loads(capsys.readouterr().out)
    cfg = load_config(plan[0])
    tokens = cfg.data.train_batch_size * cfg.rollout.n * cfg.data.max_response_length
    phases = found["ranks"][0]["phases"]
    scored = phases[role]
    assert scored[f"{role} params"] == pytest.approx(7.616e9 * 2 / 4, rel=0.02)
    assert scored["teacher's tokens"] == tokens * (1 + 2 * 20) * 4
    assert phases["update_actor"]["teacher's tokens"] > 0
    assert [name for name, parts in phases.items() if f"{role} params" in parts] == [role]
    dp = 4 // cfg.actor.megatron.tensor_model_parallel_size
    trained = 2 * tokens * cfg.actor.ppo_mini_batch_size / cfg.data.train_batch_size / dp
    assert found["host_memory"]["parts"]["teacher's tokens"] == 4 * (tokens + trained) * 20 * 8
    # Products of all weights but the embedding, on 4 ranks at 989 TFLOP/s.
    sequences = cfg.data.train_batch_size * cfg.rollout.n
    length = cfg.data.max_prompt_length + cfg.data.max_response_length
    flops = 2 * 6.5e9 * sequences * length
    assert found["times"]["phases"][role]["products"] == pytest.approx(flops / 4 / 989e12, rel=0.15)


@pytest.mark.parametrize("source", ["actor", "ref"])
def test_a_teacher_that_is_the_policy_has_a_pass_and_no_weights(
    capsys: pytest.CaptureFixture[str], source: str
) -> None:
    role = "distillation.teacher_models.t"
    settings = [
        "distillation.enabled=true",
        f"{role}.source={source}",
        f"{role}.log_prob_max_token_len_per_gpu=32768",
        "algorithm.use_kl_in_reward=false",
        "ref.megatron.param_offload=true",
    ]
    assert main([*PLAN_SMALL, "--json", *settings]) == 0
    found = json.loads(capsys.readouterr().out)
    phases = found["ranks"][0]["phases"]
    with_reference = [name for name, parts in phases.items() if "ref params" in parts]
    assert with_reference == ([role] if source == "ref" else [])
    assert not any(f"{role} params" in parts for parts in phases.values())
    assert phases[role]["activations"] == phases["old_log_prob"]["activations"]
    times = found["times"]["phases"]
    assert times[role]["products"] == times["old_log_prob"]["products"]
    assert "ref" not in phases and "ref" not in times
