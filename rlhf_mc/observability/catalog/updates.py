"""Metrics of the updates of actor and critic."""

from __future__ import annotations

from rlhf_mc.observability.catalog.metric import Metric, Section

_TOKENS = "mean over tokens, then over mini-batches"
_LOSS = "by `loss_agg_mode`, then mean over mini-batches"
_UPDATES = "mean over mini-batches"
_RESPONSES = "mean over a response's tokens, then over responses"

ACTOR = Section(
    "Actor update",
    [
        Metric(
            "actor/loss",
            "the minimised loss: policy loss − `entropy_coeff` · entropy + `kl_loss_coef` · KL "
            "loss + `positive_nll_coef` · NLL + the distillation loss",
            "–",
            _LOSS,
        ),
        Metric(
            "actor/pg_loss",
            "policy loss alone",
            "–",
            _LOSS,
            "its size means little: advantages with a mean of 0 keep it near 0",
        ),
        Metric(
            "actor/pg_clipfrac",
            "share of tokens where the ratio clip holds back the update; with `clip_cov` and "
            "`kl_cov` share of selected tokens, with `sao` and `dppo_...` of tokens left out",
            "share",
            _TOKENS,
            "above about 0.2: steps too large",
        ),
        Metric(
            "actor/pg_clipfrac_lower",
            "share of tokens where the dual clip (`clip_ratio_c`) limits the loss, A < 0 only; "
            "with `geo_mean` of tokens clipped from below; with `dppo_...` of tokens where it "
            "limits the ratio",
            "share",
            _TOKENS,
            "normally near 0",
        ),
        Metric(
            "actor/ppo_kl",
            "old log-prob − log-prob: how far the update has moved from the policy that sampled",
            "nats",
            _TOKENS,
            "exactly 0 in the first mini-batch of a step; growth over steps: lower the learning "
            "rate or `ppo_epochs`",
        ),
        Metric(
            "actor/expert_choices_diff",
            "share of the replayed choices of experts that the routers would not have made in the "
            "updates, which change their weights; with router replay",
            "share",
            "mean over tokens, layers and choices",
            "growth over steps: the updates move the routers far; lower the learning rate or "
            "`ppo_epochs`",
        ),
        Metric(
            "actor/router_aux_loss",
            "auxiliary loss of the routers without `moe_aux_loss_coeff` "
            "([algorithms.md](algorithms.md#losses-of-routers)); where routers have a loss or "
            "biases that move",
            "–",
            "mean over sequences, layers with experts and mini-batches",
            "1: even loads; toward the number of experts over those of a token: a few experts get "
            "all tokens",
        ),
        Metric(
            "actor/router_z_loss",
            "square of the routers' logsumexp, without `moe_z_loss_coeff`",
            "–",
            "mean over tokens, layers with experts and mini-batches",
            "growth over steps: the logits of the routers grow",
        ),
        Metric(
            "actor/entropy",
            "the policy's entropy, whatever `loss_agg_mode` is",
            "nats",
            _TOKENS,
            "near 0: no exploration is left",
        ),
        Metric(
            "actor/entropy_loss",
            "the same aggregated like the policy loss, as the bonus is",
            "nats",
            _LOSS,
        ),
        Metric(
            "actor/entropy_coeff",
            "coefficient of the entropy bonus in this step; with `entropy_coeff_end`",
            "–",
            "–",
        ),
        Metric(
            "actor/kl_loss",
            "KL to the reference by `kl_loss_type`, aggregated like the policy loss "
            "([algorithms.md](algorithms.md)); with `use_kl_loss`",
            "nats",
            _LOSS,
        ),
        Metric(
            "actor/positive_nll",
            "−log-prob of the tokens of right responses; with `positive_nll_coef`",
            "nats",
            "mean over these tokens, 0 without one, then over mini-batches",
        ),
        Metric(
            "actor/env_loss",
            "−log-prob of the tokens of observations; with `env_loss_coef`",
            "nats",
            "mean over these tokens, then over mini-batches that have any",
        ),
        Metric(
            "actor/distillation_loss",
            "the distillation loss without its coefficient ([algorithms.md]"
            "(algorithms.md#distillation)), as a term of the loss or in the advantages",
            "nats",
            _LOSS,
            "should fall",
        ),
        Metric(
            "distillation/<name>/kl",
            "log-prob of the policy that sampled − the teacher's: KL(student, teacher), of this "
            "teacher's rows",
            "nats",
            "mean over tokens, each clamped to ±20",
            "should fall; large from the start: another chat template or tokenizer",
        ),
        Metric("distillation/<name>/num_tokens", "drawn tokens that it has scored", "count", "sum"),
        Metric(
            "distillation/<name>/top_mass",
            "probability of its `topk` tokens; with `forward_kl_topk`",
            "share",
            "mean over tokens",
            "far below 1: raise `topk`",
        ),
        Metric(
            "actor/kl_coef",
            "weight of the KL loss in this step: `kl_loss_coef`, or the controller's with "
            "`kl_ctrl.type: adaptive`; with `use_kl_loss`",
            "–",
            "–",
        ),
        Metric(
            "actor/controlled_kl",
            "KL to the reference before the update by `kl_penalty`; with an adaptive coefficient "
            "of the KL loss",
            "nats",
            _RESPONSES,
            "the controller holds it near `target_kl`",
        ),
        Metric("actor/grad_norm", "global gradient norm before clipping", "–", _UPDATES, "spikes"),
        Metric(
            "{actor,critic}/skipped",
            "share of the step's updates that were skipped because loss or gradient was not finite",
            "share",
            _UPDATES,
            "above 0: the samples are in `nonfinite_step_N.json`; the run aborts after 3 "
            "consecutive ones",
        ),
        Metric(
            "{actor,critic}/computed_tokens",
            "tokens that the update computes outside attention over the tokens that it trains on, "
            "prompts and responses (`megatron.share_prompts`)",
            "share",
            _UPDATES,
            "near 1 with long prompts: micro-batches too small for several responses to a prompt",
        ),
        Metric("actor/lr", "learning rate used", "–", _UPDATES),
        Metric(
            "actor/reward_kl_penalty",
            "KL to the reference by `kl_penalty`; with `use_kl_in_reward`",
            "nats",
            _RESPONSES,
            "rises with training; the adaptive controller holds it near `target_kl`",
        ),
        Metric(
            "actor/reward_kl_penalty_coeff", "coefficient that this step's rewards used", "–", "–"
        ),
        Metric(
            "actor/<statistic>",
            "a further number per token that your own policy loss hands to `inputs.result` "
            "([extending.md](extending.md))",
            "of the number",
            _TOKENS,
            is_users_own=True,
        ),
    ],
)

CRITIC = Section(
    "Critic update",
    [
        Metric(
            "critic/vf_loss",
            "clipped value loss, ½ · max of both squared errors",
            "score²",
            _LOSS,
            "should fall",
        ),
        Metric(
            "critic/vf_clipfrac",
            "share of tokens where the clipped error is the larger one",
            "share",
            _TOKENS,
            "high for long: raise `cliprange_value`",
        ),
        Metric("critic/vpred_mean", "value during the update", "score", _TOKENS),
        Metric("critic/grad_norm", "global gradient norm before clipping", "–", _UPDATES, "spikes"),
        Metric("critic/lr", "learning rate used", "–", _UPDATES),
    ],
    "Only with an estimator that has a critic ([algorithms.md](algorithms.md)).",
)
