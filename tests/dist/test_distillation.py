"""Distillation: teachers' log-probs, losses and gradients against transformers in float64, in
layouts of student and teacher, and whole steps with one and several teachers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import distill_cases
import numpy as np
import pyarrow.parquet as pq
import pytest
import resume_cases
import torch
from distill_cases import Layout
from gpu_parts.engines import TEMPERATURE
from gpu_parts.reference import Reference
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint, make_tokenizer, make_workspace, write_config

from rlhf_mc.checkpoint.training_state import stored_models
from rlhf_mc.config.reward_schema import DistillationLossConfig
from rlhf_mc.config.schema import ActorConfig
from rlhf_mc.data.batch import (
    OBSERVED,
    Generation,
    Prompt,
    RaggedBatch,
    Responses,
    build_batch,
)
from rlhf_mc.data.source import write_prompts

pytestmark = pytest.mark.dist

TEACHERS = "distillation.teacher_models"
LOSS = "distillation.distillation_loss"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a workspace with teachers: a model of another seed and size, and models with padded
    vocabularies of other sizes."""
    directory = make_workspace(tmp_path_factory.mktemp("distillation"), num_hidden_layers=2)
    make_checkpoint(directory / "teacher", seed=3, tied=False)
    make_checkpoint(directory / "narrow", seed=5, num_hidden_layers=2, vocab_size=262)
    make_checkpoint(directory / "wide", seed=4, num_kv_heads=4, num_hidden_layers=2, vocab_size=331)
    write_config(
        directory,
        actor={"ppo_epochs": 1},
        algorithm={
            "adv_estimator": "grpo",
            "use_kl_in_reward": False,
            "kl_ctrl": {"type": "fixed"},
        },
        distillation={
            "enabled": True,
            "teacher_models": {
                "t": {
                    "model_path": str(directory / "teacher"),
                    "log_prob_max_token_len_per_gpu": 96,
                }
            },
        },
    )
    return directory


def student_batch(of_teacher: bool = False) -> tuple[RaggedBatch, list[Prompt]]:
    """Return a batch whose first three sequences have one prompt, and a later one an observation of
    three tokens, and its prompts. of_teacher: the teacher's prompts are in the batch."""
    draw = torch.Generator().manual_seed(5)
    same = torch.randint(1, 260, (9,), generator=draw).tolist()
    prompts = [
        Prompt(i, np.array(ids, np.int32), "a", None, teacher_ids=np.array(hint, np.int32))
        for i, (ids, hint) in enumerate(
            zip(
                [same, same, same, [3, 1, 4, 1], [5, 9]],
                [[8, 2], [8, 2], [8, 2], [6, *same], [*same, 7, 7]],
                strict=True,
            )
        )
    ]
    responses = []
    for length in (6, 1, 11, 5, 7):
        tokens = torch.randint(1, 260, (length,), generator=draw).tolist()
        responses.append(Generation(tokens, [0.0] * length, True))
    observed = responses[3]
    responses[3] = Generation(
        [*observed.token_ids, 7, 8, 9, 10], [0.0] * 5 + [OBSERVED] * 3 + [0.0], True
    )
    read = [replace(p, token_ids=p.teacher_ids) for p in prompts] if of_teacher else prompts
    batch = build_batch(read, Responses.of(responses))
    size = len(batch.rollout_log_probs)
    batch = batch.with_fields(
        old_log_probs=0.3 * torch.randn(size, generator=draw) - 4.0,
        advantages=torch.randn(size, generator=draw),
    )
    return batch, prompts


def all_log_probs(model: Reference, batch: RaggedBatch, vocab_size: int) -> torch.Tensor:
    """Return the log-probs of all tokens of the vocabulary at each position: [R, vocab_size]."""
    logits = model.model.lm_head(torch.cat(model._states(batch)))[:, :vocab_size]
    return (logits / TEMPERATURE).log_softmax(-1)


def wanted_loss(
    loss: DistillationLossConfig, student: torch.Tensor, teacher: torch.Tensor, batch: RaggedBatch
) -> torch.Tensor:
    """Return the actor's loss by its definition. student, teacher: of all_log_probs."""
    targets = batch.drawn_tokens.long()[:, None]
    p, q = (x.gather(1, targets)[:, 0] for x in (student, teacher))
    if loss.loss_mode == "forward_kl_topk":
        log_q, top = teacher.topk(loss.topk)
        log_p = student.gather(1, top)
        if loss.log_prob_min_clamp is not None:
            log_p, log_q = (x.clamp(min=loss.log_prob_min_clamp) for x in (log_p, log_q))
        rest_p, rest_q = (1 - x.exp().sum(1) for x in (log_p, log_q))
        losses = (log_q.exp() * (log_q - log_p)).sum(1) + rest_q * (rest_q / rest_p).log()
    elif loss.loss_mode == "k3":
        losses = (q - p).exp() - 1 - (q - p)
    else:
        losses = p - q
    if loss.loss_max_clamp is not None:
        losses = losses.clamp(-loss.loss_max_clamp, loss.loss_max_clamp)
    assert batch.advantages is not None and batch.old_log_probs is not None
    coef = loss.distillation_loss_coef if loss.use_task_rewards else 1.0
    advantages = batch.advantages * loss.use_task_rewards
    if loss.use_policy_gradient:
        advantages = advantages - coef * losses.detach()
    ratio = (p - batch.old_log_probs).clamp(-20, 20).exp()
    policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    policy = torch.where(advantages < 0, torch.minimum(policy, -3.0 * advantages), policy)
    return policy.mean() + (0 if loss.use_policy_gradient else coef * losses.mean())


LOSSES = [
    DistillationLossConfig(distillation_loss_coef=0.7),
    DistillationLossConfig("k1", use_task_rewards=False, use_policy_gradient=True),
    DistillationLossConfig("forward_kl_topk", topk=5, loss_max_clamp=1.5),
    DistillationLossConfig("forward_kl_topk", topk=70, log_prob_min_clamp=-6.0),
    DistillationLossConfig(
        "forward_kl_topk", topk=7, use_policy_gradient=True, distillation_loss_coef=0.3
    ),
]
ONE = Layout()


@pytest.mark.parametrize(
    ("world", "student", "teacher", "checkpoint"),
    [
        (1, ONE, ONE, "teacher"),
        (2, Layout(tp=2), ONE, "wide"),
        (2, ONE, Layout(tp=2), "narrow"),
        (2, Layout(pp=2), Layout(cp=2), "teacher"),
        (2, Layout(cp=2), Layout(pp=2), "wide"),
        (4, Layout(tp=2, cp=2), Layout(tp=4), "wide"),
        (2, ONE, ONE, "actor"),
        (2, Layout(tp=2), ONE, "actor"),
        (2, Layout(pp=2), ONE, "actor"),
        (2, Layout(cp=2), ONE, "actor"),
    ],
)
def test_losses_and_gradients_match_transformers(
    pool: Any,
    workspace: Path,
    world: int,
    student: Layout,
    teacher: Layout,
    checkpoint: str,
) -> None:
    """Take as checkpoint "actor" the student itself, with other prompts."""
    batch, prompts = student_batch()
    of_itself = checkpoint == "actor"
    path = str(workspace / "model")
    results = pool(world).run(
        distill_cases.gradients,
        student=path,
        teacher=checkpoint if of_itself else str(workspace / checkpoint),
        layouts=(student, teacher),
        batch=batch,
        prompts=prompts,
        losses=LOSSES,
        cfg=ActorConfig(),
    )
    actor, model = (
        Reference(str(workspace / name), dtype=torch.float64)
        for name in ("model", "model" if of_itself else checkpoint)
    )
    common = min(actor.model.config.vocab_size, model.model.config.vocab_size)
    with torch.no_grad():
        given = all_log_probs(model, student_batch(of_itself)[0], common)
    for number, loss in enumerate(LOSSES):
        actor.model.zero_grad()
        of_student = all_log_probs(actor, batch, actor.model.config.vocab_size)
        value = wanted_loss(loss, of_student, given, batch)
        value.backward()
        for rank, result in enumerate(results):
            mini, rows, stats, grads = result[number]
            drawn = given.gather(1, batch.drawn_tokens.long()[:, None])[:, 0]
            assert (mini.teacher_log_probs - drawn).abs().max() < 2e-5
            if loss.loss_mode == "forward_kl_topk":
                log_q, top = given.topk(loss.topk)
                tokens, log_probs = rows.chunk(2, 1)
                assert (log_probs - log_q).abs().max() < 2e-5
                assert torch.equal(tokens.long(), top)
            assert stats["loss"] == pytest.approx(float(value.detach()), rel=2e-5)
            for name, param in actor.model.named_parameters():
                if name not in grads or param.grad is None:
                    continue
                error = (grads[name] - param.grad).abs().max() / param.grad.abs().max()
                assert error < 1e-4, f"rank {rank}, {loss}, {name}: off by {float(error):.1e}"


@pytest.fixture(scope="module")
def two_sources(workspace: Path) -> list[str]:
    """Return overrides for training prompts of two data sources, with a teacher each."""
    file = workspace / "two.parquet"
    rows = pq.read_table(workspace / "train.parquet").to_pylist()
    for number, row in enumerate(rows):
        row["data_source"] = ("arithmetic", "other")[number % 2]
        row["hint"] = f"{number}+{number}"
    write_prompts(file, rows)
    return [
        f"data.train_files={file}",
        f"{TEACHERS}.t.key=arithmetic",
        f"{TEACHERS}.w.key=other",
        f"{TEACHERS}.w.model_path={workspace}/wide",
        f"{TEACHERS}.w.log_prob_max_token_len_per_gpu=96",
    ]


PARTIAL = [
    "rollout.partial_rollout=true",
    "rollout.prompts_in_flight=12",
    "algorithm.rollout_correction.rollout_is=token",
]


def itself(source: str, column: str) -> list[str]:
    """Return overrides for the teacher t that is the policy."""
    given = ("model_path=null", f"source={source}", f"prompt_key={column}")
    return [f"{TEACHERS}.t.{setting}" for setting in given]


TOP = [f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=6"]


def test_two_teachers_in_layouts_of_their_own_give_the_same_training(
    pool: Any, workspace: Path, two_sources: list[str]
) -> None:
    """Train with adapters, partial rollouts, and groups that are dropped."""
    config = str(workspace / "config.yaml")
    for name in ("run", "again"):
        (workspace / name).mkdir()
    settings = [
        *two_sources,
        *PARTIAL,
        *TOP,
        "actor.lora.rank=4",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=score",
    ]
    [one] = pool(1).run(distill_cases.steps, config_path=config, overrides=settings)
    layout = [
        "actor.megatron.tensor_model_parallel_size=2",
        f"{TEACHERS}.t.megatron.tensor_model_parallel_size=1",
        f"{TEACHERS}.t.megatron.pipeline_model_parallel_size=2",
        f"{TEACHERS}.w.megatron.tensor_model_parallel_size=1",
        f"{TEACHERS}.w.megatron.context_parallel_size=2",
    ]
    results = pool(2).run(
        distill_cases.steps,
        config_path=config,
        overrides=[
            *settings,
            *layout,
            f"trainer.replay={workspace / 'run'}",
            f"trainer.default_local_dir={workspace / 'again'}",
        ],
    )
    for rank in results:
        for wanted, result in zip(one, rank, strict=True):
            assert torch.equal(wanted["batch"].tokens, result["batch"].tokens)
            assert (wanted["sources"] == result["sources"]).all()
            names = [key for key in wanted["metrics"] if "distillation/" in key]
            assert len(names) == 6
            for name, source in (("t", "arithmetic"), ("w", "other")):
                rows = torch.from_numpy(result["sources"] == source)
                num_tokens = int(result["batch"].response_lens[rows].sum())
                assert result["metrics"][f"distillation/{name}/num_tokens"] == num_tokens > 0
            for key in (*names, "actor/distillation_loss", "actor/loss", "actor/grad_norm"):
                assert result["metrics"][key] == pytest.approx(
                    wanted["metrics"][key], rel=1e-3, abs=1e-5
                ), key


def test_pools_and_a_resumed_run_have_the_same_bits(
    pool: Any, workspace: Path, two_sources: list[str], tmp_path: Path
) -> None:
    def train(name: str, world: int, *overrides: str) -> dict[str, Any]:
        settings = [
            *two_sources,
            *itself("actor", "hint"),
            *TOP,
            f"{LOSS}.use_policy_gradient=true",
            "trainer.save_freq=1",
            f"trainer.default_local_dir={tmp_path / name}",
            *overrides,
        ]
        result: dict[str, Any] = pool(world).run(
            resume_cases.train,
            config_path=str(workspace / "config.yaml"),
            overrides=settings,
            record_at=1,
        )[0]
        return result

    whole = train("whole", 1)
    saved = tmp_path / "whole" / "global_step_1"
    assert list(stored_models(saved)) == ["actor"], "a teacher is not saved"
    # one of the two teachers in each pool
    of_two = ["resource_pools.train=1", "resource_pools.rollout=1", f"{TEACHERS}.w.pool=rollout"]
    pools = train("pools", 2, *of_two)
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}"]
    resumed = train("resumed", 1, *resume)
    assert resumed["steps"] == [2]
    for other in (pools, resumed):
        assert len(whole["last"]) == len(other["last"]) > 0
        for (key, *_, values), (same_key, *_, others) in zip(
            whole["last"], other["last"], strict=True
        ):
            assert key == same_key and np.array_equal(values, others), key


@pytest.mark.parametrize("world", [1])
def test_a_teacher_that_is_the_actor_changes_nothing(
    pool: Any, workspace: Path, world: int
) -> None:
    for mode, settings in (
        ("k3", [f"{TEACHERS}.t.model_path={workspace}/model"]),
        ("forward_kl_topk", [f"{TEACHERS}.t.model_path={workspace}/model"]),
        ("k3", itself("actor", "prompt")),
        ("forward_kl_topk", itself("ref", "prompt")),
    ):
        [result] = pool(world).run(
            distill_cases.steps,
            config_path=str(workspace / "config.yaml"),
            overrides=[
                *settings,
                f"{LOSS}.loss_mode={mode}",
                f"{LOSS}.use_task_rewards=false",
                "actor.entropy_coeff=0",
                "actor.ppo_mini_batch_size=8",
            ],
            count=1,
        )
        metrics = result[0]["metrics"]
        assert abs(metrics["distillation/t/kl"]) < 1e-5
        assert metrics["actor/distillation_loss"] < 1e-9
        assert metrics["actor/grad_norm"] < 1e-5
        if mode == "k3":
            assert metrics["actor/distillation_loss"] == metrics["actor/grad_norm"] == 0


@pytest.mark.parametrize("world", [1])
def test_first_weights_are_those_of_the_checkpoint(
    pool: Any, workspace: Path, two_sources: list[str], world: int
) -> None:
    """Compare the reference as a teacher with a model of its own, and with the actor without its
    adapters."""
    of_both = [f"{TEACHERS}.t.prompt_key=hint", *two_sources, *TOP, "actor.lora.rank=0"]
    for settings in ([], [*PARTIAL, "actor.lora.rank=4", "algorithm.filter_groups.enable=true"]):
        one, other = (
            pool(world).run(
                distill_cases.steps,
                config_path=str(workspace / "config.yaml"),
                overrides=[*of_both, *settings, *teacher],
            )[0]
            for teacher in ([f"{TEACHERS}.t.model_path={workspace}/model"], itself("ref", "hint"))
        )
        for wanted, result in zip(one, other, strict=True):
            assert torch.equal(wanted["batch"].teacher_log_probs, result["batch"].teacher_log_probs)
            for key in ("distillation/t/kl", "actor/distillation_loss", "actor/grad_norm"):
                assert wanted["metrics"][key] == result["metrics"][key], key
            assert result["batch"].ref_log_probs is None
        assert one[1]["metrics"]["distillation/t/kl"] != 0


def error_of(pool: Any, workspace: Path, *overrides: str) -> str:
    """Return the line of the UserError that both ranks raise in the first step, or before it."""
    outcomes = pool(2).outcomes(
        distill_cases.steps,
        config_path=str(workspace / "config.yaml"),
        overrides=list(overrides),
        count=1,
    )
    assert not any(ok for ok, _ in outcomes)
    [(kind, line)] = {value[:2] for _, value in outcomes}
    assert kind == "UserError" and "\n" not in line
    return str(line)


@pytest.mark.parametrize("world", [2])
def test_teachers_that_do_not_fit_are_refused_by_name(
    pool: Any, workspace: Path, two_sources: list[str], world: int
) -> None:
    other = make_checkpoint(workspace / "other", num_hidden_layers=1)
    make_tokenizer(other, ["user"])
    message = error_of(pool, workspace, f"{TEACHERS}.t.model_path={other}")
    assert message.startswith(f"{TEACHERS}.t.model_path {other}: its tokenizer has '")
    assert message.endswith("it needs the actor's tokenizer")
    message = error_of(pool, workspace, *two_sources, f"{TEACHERS}.w.key=third")
    assert "two.parquet, row 1: no teacher for the data source 'other'; those of" in message
    assert message.endswith("have the keys 'arithmetic', 'third'")
    broken = Path(shutil.copytree(workspace / "teacher", workspace / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)  # values that are not finite are never read
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    message = error_of(pool, workspace, *two_sources, f"{TEACHERS}.t.model_path={broken}")
    assert message == f"{TEACHERS}.t.model_path: {broken}: a log-prob is not finite in step 1"
