"""Lower bounds of times: hand-computed numbers of the 70B config on 64 H100, and directions of
change."""

from __future__ import annotations

import json
from typing import Any

import pytest
from documents import ROOT
from families import changed, shape_of, traits
from published import PLAN_70B

from rlhf_mc.planner.__main__ import main
from rlhf_mc.planner.generation_time import decode_weight_bytes, ring_seconds
from rlhf_mc.planner.gpus import GPUS, Machine
from rlhf_mc.planner.published import MODELS


@pytest.fixture
def times(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the times of the 70B config with these overrides or options, whether it fits or
    not."""

    def of(*arguments: str) -> dict[str, Any]:
        main([*PLAN_70B, *arguments, "--json"])
        return json.loads(capsys.readouterr().out)["times"]

    return of


def test_shared_prompts(times: Any) -> None:
    """Plan with 8 responses of 256 tokens to prompts of 1,024: 5 whole sequences of 1,280 tokens
    are in a micro-batch of 8,192, or the 8 with one prompt, 3,072 tokens."""
    lengths = ("--mean-prompt-length", "1024", "--mean-response-length", "256")
    settings = (
        "rollout.n=8",
        "actor.ppo_max_token_len_per_gpu=8192",
        "critic.ppo_max_token_len_per_gpu=8192",
    )
    off = "actor.megatron.share_prompts=false"
    whole = times(*lengths, *settings, off)["phases"]
    shared = times(*lengths, *settings)["phases"]
    ratio = 8 * 1280 / 3072
    # A critic has the settings of the actor. Its attention has whole sequences: 1 % of its FLOPs.
    of_critic = whole["update_critic"]["products"] / shared["update_critic"]["products"]
    assert 0.95 * ratio < of_critic < ratio
    found = whole["update_actor"]["tensor parallel"] / shared["update_actor"]["tensor parallel"]
    assert 0.9 * ratio < found < ratio
    # With n responses of 2,048 to prompts of 100 nothing is shared: the ratio is 1.04.
    short = ("--mean-prompt-length", "100", "--mean-response-length", "2048", *settings)
    assert times(*short) == times(*short, off)


def test_pools_work_at_the_same_time(times: Any) -> None:
    """Compare the 70B config on 64 + 64 GPUs with the whole config on 64: the step is the longer of
    generation and training, and the weight update, whose bytes are one engine rank's shard."""
    pools = ("resource_pools.train=64", "resource_pools.rollout=64", "--nodes", "16")
    ahead = ("rollout.one_step_off=true", "algorithm.rollout_correction.rollout_is=token")
    together = times()
    scorer = f"reward_models.a.model_path={MODELS / 'llama-3-70b'}"
    found = times(*pools, *ahead)
    seconds = {name: sum(parts.values()) for name, parts in found["phases"].items()}
    for name, parts in together["phases"].items():
        if name not in ("update_weights", "offload"):
            assert seconds[name] == pytest.approx(sum(parts.values()))
    training = sum(seconds.values()) - seconds["gen"] - seconds["update_weights"]
    longer = max(training, seconds["gen"])
    assert found["step_seconds"] == pytest.approx(longer + seconds["update_weights"])
    assert times(*pools)["step_seconds"] == pytest.approx(sum(seconds.values()))
    for role, settings in (("ref", []), ("reward_models.a", [scorer])):
        found = times(*pools, *ahead, *settings, f"{role}.pool=rollout")
        seconds = {name: sum(parts.values()) for name, parts in found["phases"].items()}
        update = seconds.pop("update_weights")
        rollout = seconds.pop("gen") + seconds.pop(role)
        longer = max(rollout, sum(seconds.values()))
        assert found["step_seconds"] == pytest.approx(longer + update)


@pytest.mark.slow
def test_70b_by_hand(times: Any) -> None:
    """Compare with products of the sizes: 855,638,016 weights a layer, sequences of 1024 + 2048
    tokens."""
    found = times()
    phases = found["phases"]
    layers = 80 * (2 * 855_638_016 * 3072 + 4 * 8192 * 3072 * 3073 / 2)  # FLOPs of a sequence
    output = 2048 * 2 * 8192 * 128256
    # The last of 4 stages works on the 512 sequences of a replica, over 8 tensor-parallel ranks.
    last_stage = 512 * (layers / 4 + output) / 8 / 989e12
    assert last_stage == pytest.approx(7.28, abs=0.01)
    assert phases["old_log_prob"]["products"] == pytest.approx(last_stage)
    # Forward 1, backward 2; of the output layer also the logits again. Four optimizer steps, one
    # epoch.
    assert phases["update_actor"]["products"] == pytest.approx(
        512 * (3 * layers / 4 + 4 * output) / 8 / 989e12
    )
    # A critic has equal stages: with 128 / 2 micro-batches, 4 stages and 4 chunks the bubble is 3 /
    # (4 * 64 + 3).
    critic = phases["update_critic"]
    work = critic["products"] + critic["tensor parallel"]
    assert critic["bubble"] / (critic["bubble"] + work) == pytest.approx(3 / 259, rel=0.01)
    # In each of 20 layers two gathers and two scatters of the tokens' states, each bringing 7 / 8
    # of them; embedding and output layer add a hundredth. A backward pass waits for two gathers
    # more.
    scattered = 512 * 3072 * 20 * 4 * 8192 * 2 * 7 / 8 / 450e9
    assert phases["old_log_prob"]["tensor parallel"] == pytest.approx(scattered, rel=0.02)
    assert critic["tensor parallel"] == pytest.approx(1.5 * scattered, rel=0.02)
    # New parameters reach both replicas over the network, half of 2.2e9 in each of 4 steps.
    assert critic["parameters"] == pytest.approx(4 * 2.2e9 * 2 / 2 / 50e9, rel=0.05)

    # An engine of 8 GPUs decodes its 128 sequences at once: 17.4 GB of weights and 128 x 2048 x
    # 40,960 bytes of keys and values for each of 2047 tokens.
    gen = phases["gen"]
    weights = (80 * 855_638_016 + 128256 * 8192) * 2 / 8
    assert found["sequences_at_a_time"] == 128
    assert gen["decode"] == pytest.approx(
        2047 * (weights + 128 * 2048 * 40_960) / 3.35e12, rel=1e-4
    )
    assert gen["prefill"] == pytest.approx(2.29, abs=0.01)
    # Two all-reduces a layer, each of which brings a rank 2 x 7 / 8 of the states, and the logits
    # of sampled tokens.
    states = 128 * (1024 + 2047) * 2 * 80 * 8192 * 2 * 2
    logits = 128 * 2047 * 128256 * 4
    assert gen["tensor parallel"] == pytest.approx((states + logits) * 7 / 8 / 450e9, rel=1e-3)

    # To the device come the weights of the actor twice (log-probs, update), of critic and reference
    # once, and two optimizer states of 13.2 GB.
    assert phases["offload"]["onload"] == pytest.approx((4 * 4.7e9 + 2 * 13.2e9) / 64e9, rel=0.03)
    assert found["step_seconds"] == pytest.approx(
        sum(sum(parts.values()) for parts in phases.values())
    )
    assert found["tokens_per_second_per_gpu"] == pytest.approx(
        1024 * 3072 / found["step_seconds"] / 64
    )
    assert sum(found["shares"].values()) == pytest.approx(1.0)


@pytest.mark.slow
def test_one_update_has_no_pass_of_old_log_probs(times: Any) -> None:
    one_update = ("actor.ppo_mini_batch_size=1024", "algorithm.use_kl_in_reward=false")
    with_loss = times(*one_update, "actor.use_kl_loss=true")
    assert "old_log_prob" not in with_loss["phases"] and "ref" in with_loss["phases"]
    read = times(*one_update, "actor.use_kl_loss=true", "actor.policy_loss.loss_mode=kl_cov")
    of_pass = sum(read["phases"]["old_log_prob"].values())
    onload = read["phases"]["offload"]["onload"] - with_loss["phases"]["offload"]["onload"]
    assert read["step_seconds"] == pytest.approx(with_loss["step_seconds"] + of_pass + onload)
    assert of_pass > 0.05 * read["step_seconds"]


@pytest.mark.slow
def test_directions(times: Any) -> None:
    as_shipped = times()["phases"]

    def change(phase: str, part: str, *overrides: str) -> float:
        return times(*overrides)["phases"][phase][part] / as_shipped[phase][part]

    role = (
        "actor.megatron.recompute_granularity=full",
        "critic.megatron.recompute_granularity=full",
    )
    # A critic has no output layer: 4 forward passes instead of 3.
    assert change("update_critic", "products", *role) == pytest.approx(4 / 3, rel=1e-3)
    assert (
        1.1
        < change("update_actor", "products", "actor.megatron.recompute_granularity=selective")
        < 4 / 3
    )
    assert change("gen", "decode", "rollout.tensor_model_parallel_size=4") > 1
    # 16 ranks halve the weights of each, but two ranks then hold each of 8 KV heads, of twice as
    # many sequences.
    assert 1 < change("gen", "decode", "rollout.tensor_model_parallel_size=16") < 1.1
    # fewer sequences at a time
    assert change("gen", "decode", "rollout.gpu_memory_utilization=0.28") > 1
    assert change("gen", "decode", "rollout.quantization=fp8") < 1
    # Interleaving: chunks divide the bubble.
    one_chunk = change(
        "update_critic", "bubble", "actor.megatron.virtual_pipeline_model_parallel_size=null"
    )
    assert one_chunk == pytest.approx(4, rel=0.02)
    # Messages between stages are hidden by other chunks, unless they take longer than the products.
    assert as_shipped["update_critic"]["pipeline"] == 0
    assert times("--network-bandwidth", "1e8")["phases"]["update_critic"]["pipeline"] > 0
    # Across nodes a collective is slower, unless the network is as fast as NVLink.
    beyond = (
        "actor.megatron.tensor_model_parallel_size=16",
        "actor.megatron.pipeline_model_parallel_size=2",
    )
    slow = change("update_critic", "tensor parallel", *beyond)
    assert (
        slow
        > 1.1 * change("update_critic", "tensor parallel", *beyond, "--network-bandwidth", "450e9")
        > 2
    )
    assert change("update_actor", "products", "actor.megatron.fp8=blockwise") < 0.6
    assert change("offload", "onload", "actor.megatron.optimizer_offload=false") < 1
    # Without a plan the two states of 13.2 GB come for each of four steps.
    assert change("offload", "onload", "trainer.planner=off") == pytest.approx(
        1 + 6 * 13.2 / 45.2, rel=0.02
    )
    assert change("update_actor", "products", "--mean-response-length", "400") < 0.5
    assert change("update_actor", "products", "--gpu", "a100") == pytest.approx(989 / 312)
    assert change("update_actor", "products", "actor.ppo_epochs=2") == pytest.approx(2)


def test_engine_steps_read_the_experts_that_are_used() -> None:
    shape = changed(
        shape_of("qwen3_moe"), num_layers=1, num_experts=8, experts_per_token=2, vocab_size=0
    )
    block = traits(shape)
    expert = 3 * shape.hidden_size * block.expert_ffn_hidden_size
    rest = decode_weight_bytes(shape, 1, 1, 1, 1) - 2 * expert
    assert rest == shape.hidden_size * block.head_dim * 2 * (block.num_heads + block.num_kv_heads)
    # 8 (1 - (6 / 8)^2)
    assert decode_weight_bytes(shape, 1, 1, 1, 2) == pytest.approx(rest + 3.5 * expert)
    assert decode_weight_bytes(shape, 1, 1, 1, 1000) == pytest.approx(rest + 8 * expert)


def test_rings_inside_and_across_nodes() -> None:
    rates = GPUS["h100"].rates
    assert rates is not None
    machine = Machine(64, 8, rates, 50e9)
    assert ring_seconds(450e9, 8, machine) == pytest.approx(7 / 8)
    # 16 ranks: 15 / 16 of the bytes, an eighth of them from the other node.
    assert ring_seconds(450e9, 16, machine) == pytest.approx(450 / 50 * 15 / 16 / 8)


def test_short_sequences_are_on_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """Plan dynamic context parallelism: as few ranks as it needs share a sequence, of 33792 tokens
    two in a pass of 16896 tokens, of 7024 one. Of two replicas, each of two ranks, a rank receives
    the keys and values of the other, in 36 layers, of 4 heads and 128 dimensions."""
    arguments = [
        str(ROOT / "configs/grpo_qwen3_8b_32k.yaml"),
        "--model",
        "qwen3-8b",
        "--nodes",
        "1",
        "--json",
    ]
    received = {}
    for length in ("6000", "32768"):
        assert main([*arguments, "--mean-response-length", length]) == 0
        plan = json.loads(capsys.readouterr().out)
        found = [
            one
            for one in plan["traffic"]
            if one["phase"] == "old_log_prob" and one["name"] == "context parallel"
        ]
        received[length] = sum(one["intra_node"] for one in found if one["kind"] == "receive")
    assert received == {"6000": 0, "32768": 256 * 16896 * 36 * 2 * 4 * 128 * 2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mean-response-length", "4000"], "--mean-response-length is 4000; it must be at most"),
        (["--mean-prompt-length", "0"], "'0' is no whole number from 1 to "),
        (["--network-bandwidth", "fast"], "'fast' is no number of bytes per second"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    try:
        code: Any = main([*PLAN_70B, *arguments])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert words in capsys.readouterr().err


def test_no_times_of_a_gpu_without_a_name(times: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert times("--gpu", "80e9") is None
    assert main([*PLAN_70B, "--gpu", "85e9"]) == 0
    assert "no times: of a GPU that is given by its bytes" in capsys.readouterr().out
