"""Distillation: teachers' log-probs, losses and gradients against transformers in float64, in
layouts of student and teacher, and whole steps with one and several teachers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import distill_cases
import pytest
import torch
from distill_cases import Layout
from gpu_parts.engines import TEMPERATURE
from gpu_parts.reference import Reference
from tiny import make_checkpoint, make_workspace, write_config

from rlhf_mc.config.reward_schema import DistillationLossConfig
from rlhf_mc.config.schema import ActorConfig
from rlhf_mc.data.batch import RaggedBatch

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
    make_checkpoint(directory / "wide", seed=4, family="qwen3", num_hidden_layers=2, vocab_size=331)
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


@pytest.mark.parametrize("world", [1])
def test_a_teacher_that_is_the_actor_changes_nothing(
    pool: Any, workspace: Path, world: int
) -> None:
    for mode in ("k3", "forward_kl_topk"):
        [result] = pool(world).run(
            distill_cases.steps,
            config_path=str(workspace / "config.yaml"),
            overrides=[
                f"{TEACHERS}.t.model_path={workspace}/model",
                f"{LOSS}.loss_mode={mode}",
                f"{LOSS}.use_task_rewards=false",
                "actor.entropy_coeff=0",
                "actor.ppo_mini_batch_size=8",
            ],
            count=1,
        )
        metrics = result[0]["metrics"]
        print({k: v for k, v in metrics.items() if "distil" in k or "actor/" in k})
        assert abs(metrics["distillation/t/kl"]) < 1e-5
        assert metrics["actor/distillation_loss"] < 1e-9
        assert metrics["actor/grad_norm"] < 1e-5


def student_batch() -> RaggedBatch:
    draw = torch.Generator().manual_seed(5)
    prompt_lens = torch.tensor([9, 9, 9, 4, 2])
    response_lens = torch.tensor([6, 1, 11, 5, 7])
    responses = int(response_lens.sum())
    tokens = torch.randint(1, 260, (int((prompt_lens + response_lens).sum()),), generator=draw)
    tokens[15:24] = tokens[25:34] = tokens[:9]  # three sequences have one prompt
    return RaggedBatch(
        tokens=tokens,
        prompt_lens=prompt_lens,
        response_lens=response_lens,
        rollout_log_probs=torch.zeros(responses),
        finished=torch.ones(5, dtype=torch.bool),
        old_log_probs=0.3 * torch.randn(responses, generator=draw) - 4.0,
        advantages=torch.randn(responses, generator=draw),
    )


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
        (1, ONE, ONE, "wide"),
        (1, ONE, ONE, "narrow"),
        (2, Layout(tp=2), ONE, "wide"),
        (2, ONE, Layout(tp=2), "narrow"),
        (2, Layout(pp=2), Layout(cp=2), "teacher"),
        (2, Layout(cp=2), Layout(pp=2), "wide"),
        (4, Layout(tp=2, cp=2), Layout(tp=4), "wide"),
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
    batch = student_batch()
    path = str(workspace / "model")
    results = pool(world).run(
        distill_cases.gradients,
        student=path,
        teacher=str(workspace / checkpoint),
        layouts=(student, teacher),
        batch=batch,
        losses=LOSSES,
        cfg=ActorConfig(),
    )
    actor, model = (
        Reference(str(workspace / name), dtype=torch.float64) for name in ("model", checkpoint)
    )
    common = min(actor.model.config.vocab_size, model.model.config.vocab_size)
    with torch.no_grad():
        given = all_log_probs(model, batch, common)
    for number, loss in enumerate(LOSSES):
        actor.model.zero_grad()
        of_student = all_log_probs(actor, batch, actor.model.config.vocab_size)
        value = wanted_loss(loss, of_student, given, batch)
        value.backward()
        for rank, result in enumerate(results):
            mini, stats, grads = result[number]
            drawn = given.gather(1, batch.drawn_tokens.long()[:, None])[:, 0]
            assert (mini.teacher_log_probs - drawn).abs().max() < 2e-5
            if loss.loss_mode == "forward_kl_topk":
                log_q, top = given.topk(loss.topk)
                tokens, log_probs = mini.teacher_top.chunk(2, 1)
                assert (log_probs - log_q).abs().max() < 2e-5
                assert torch.equal(tokens.long(), top)
            assert stats["loss"] == pytest.approx(float(value.detach()), rel=2e-5)
            for name, param in actor.model.named_parameters():
                if name not in grads or param.grad is None:
                    continue
                error = (grads[name] - param.grad).abs().max() / param.grad.abs().max()
                assert error < 1e-4, f"rank {rank}, {loss}, {name}: off by {float(error):.1e}"
