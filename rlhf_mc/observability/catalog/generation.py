"""Metrics of lengths and load, and of the agreement of rollout and trainer."""

from __future__ import annotations

from rlhf_mc.observability.catalog.metric import Metric, Section

OFF_POLICY = Section(
    "Responses of several steps",
    [
        Metric(
            "training/off_policy/trajectory_spans/{mean,max,min}",
            "weights that have drawn tokens of a response: 1 if one step has generated it",
            "count",
            "over responses",
        ),
        Metric(
            "training/off_policy/trajectory_staleness/{mean,max,min}",
            "weight updates between the newest weights that drew a token of a response and the "
            "trained ones",
            "count",
            "over responses",
        ),
        Metric(
            "training/off_policy/trajectory_staleness_worst/{mean,max,min}",
            "the same of the oldest weights that drew a token of it",
            "count",
            "over responses",
            "near `rollout.max_off_policy_threshold`: lower `rollout.prompts_in_flight`",
        ),
        Metric(
            "training/off_policy/token_share/age_<n>",
            "share of tokens that were drawn by the weights of n updates before",
            "share",
            "over response tokens",
        ),
        Metric(
            "training/off_policy/kept_groups",
            "groups that are not trained on yet, and are continued in the next step",
            "count",
            "–",
        ),
        Metric(
            "training/off_policy/refilled_groups", "groups that the step has begun", "count", "–"
        ),
        Metric(
            "training/off_policy/dropped_groups",
            "groups that were dropped at the start of the step, by "
            "`rollout.max_off_policy_threshold`",
            "count",
            "–",
            "above 0: work is lost; raise the threshold, or lower `rollout.prompts_in_flight`",
        ),
        Metric(
            "train/tail_groups",
            "groups that are left to later steps, which generate them again",
            "count",
            "–",
        ),
    ],
    "With `rollout.partial_rollout`; the last one with `tail_batching`, and "
    "with `one_step_off` all but refilled and dropped groups.\n"
    "`training/rollout_logprobs_diff_*` is then of the tokens that the trained weights drew, and "
    "absent without any;\n"
    "`training/rollout_probs_diff_*` and `rollout_corr/*` are of all tokens.",
)

LENGTHS = Section(
    "Lengths and load",
    [
        Metric(
            "response_length/{mean,max,min}",
            "tokens of a response, its EOS included",
            "tokens",
            "over responses",
        ),
        Metric(
            "response_length/clip_ratio",
            "share of responses that reached `max_response_length`",
            "share",
            "over responses",
            "high: answers are cut off",
        ),
        Metric(
            "response_length/<data_source>/{mean,max,min,clip_ratio}",
            "the same of one data source",
            "tokens, share",
            "over the data source's responses",
        ),
        Metric(
            "prompt_length/{mean,max,min}",
            "tokens of a prompt, chat template included",
            "tokens",
            "over responses",
        ),
        Metric(
            "prompt_length/clip_ratio",
            "share of prompts that are `max_prompt_length` long",
            "share",
            "over responses",
        ),
        Metric(
            "global_seqlen/{min,max,mean}",
            "tokens (prompt + response) of a data-parallel rank's share, if sequences were "
            "assigned round-robin",
            "tokens",
            "over data-parallel ranks",
        ),
        Metric(
            "global_seqlen/minmax_diff",
            "largest share less smallest",
            "tokens",
            "over data-parallel ranks",
        ),
        Metric(
            "global_seqlen/balanced_{min,max}",
            "the same after sequences are spread by cost (tokens, and the quadratic part of long "
            "ones)",
            "tokens",
            "over data-parallel ranks",
            "should be close together: the slowest rank sets the pace",
        ),
        Metric(
            "global_seqlen/idle_share",
            "share of the replicas' time spent waiting for the slowest one, estimated by that cost "
            "with the whole batch as one update; higher with mini-batches of few sequences",
            "share",
            "over data-parallel ranks",
            "below 0.03 with tens of sequences to a replica",
        ),
    ],
)

AGREEMENT = Section(
    "Agreement of rollout and trainer",
    [
        Metric(
            "training/rollout_probs_diff_{max,mean,std}",
            "difference of the two probabilities of a sampled token, absolute",
            "–",
            "over tokens",
            "float32: below 1e-4; bfloat16: a mean around 1e-2. A jump means that the weight "
            "update is wrong",
        ),
        Metric(
            "training/rollout_logprobs_diff_{mean,p99,max}",
            "absolute difference of the two log-probs: mean, 99th percentile, largest",
            "nats",
            "over tokens",
            "float32: below 1e-4; bfloat16: a mean of 0.01 to 0.04; fp8: about ten times that. "
            "`trainer.max_rollout_logprob_diff` bounds mean and p99",
        ),
        Metric(
            "training/expert_choices_diff",
            "share of the engine's choices of experts that the trainer's routers would not have "
            "made, in the pass of the old log-probs, or without one in the update; router replay "
            "takes the engine's "
            "([algorithms.md](algorithms.md#router-replay))",
            "share",
            "mean over tokens, layers and choices",
            "bfloat16: 0.01 to 0.1, without an effect on the log-probs; far more: the engines "
            "compute different models",
        ),
        Metric(
            "training/expert_choices_diff/layer_<n>",
            "the same share of layer n, 0 the first of the model; layers without experts have none",
            "share",
            "mean over tokens and choices",
            "one layer far above its neighbours: its router, or what it reads, differs between the "
            "engines",
        ),
        Metric(
            "training/prompt_expert_choices_diff",
            "share of the engine's choices for a shared prompt that differ between its responses: "
            "those of one are replayed for all",
            "share",
            "mean over tokens, layers and other responses",
            "0 where the engine has cached the prompt; far above `training/expert_choices_diff`: "
            "`megatron.share_prompts=false`",
        ),
        Metric(
            "training/rollout_actor_probs_pearson_corr",
            "correlation of the two probabilities",
            "–",
            "over tokens",
            "below 0.99: look at the differences above",
        ),
        Metric(
            "rollout_corr/{kl,k3_kl}",
            "estimates of KL(vLLM's policy, trainer's), by k1 and k3",
            "nats",
            "mean over tokens",
            "float32: below 1e-6; a rise over the steps: the engines diverge",
        ),
        Metric(
            "rollout_corr/{training,rollout}_{ppl,log_ppl}",
            "perplexity of a sequence by the trainer and by vLLM, and its logarithm",
            "–, nats",
            "mean over responses",
        ),
        Metric(
            "rollout_corr/log_ppl_{diff,abs_diff,diff_max,diff_min}",
            "difference of the logarithms, trainer less vLLM, and absolute",
            "nats",
            "mean, largest, smallest of the responses",
            "away from 0: one engine is surer than the other",
        ),
        Metric(
            "rollout_corr/ppl_ratio",
            "ratio of the perplexities, trainer / vLLM",
            "–",
            "mean over responses",
        ),
        Metric(
            "rollout_corr/{chi2_token,chi2_seq}",
            "χ² divergence: mean of ρ² − 1 over tokens, and of the product over a sequence; ρ = "
            "trainer's probability / vLLM's",
            "–",
            "mean over tokens, over responses",
            "the variance that importance weights would have",
        ),
        Metric(
            "rollout_corr/rollout_is_{mean,std,max,min}",
            "importance weights after the bound, before `rollout_is_batch_normalize`; with "
            "`rollout_is: sequence` max "
            "and min are those before the bound. This row and the next five: with `rollout_is`",
            "–",
            "over tokens",
        ),
        Metric(
            "rollout_corr/rollout_is_eff_sample_size",
            "mean² / mean of squares of the weights: the share of tokens that they are worth",
            "share",
            "over tokens",
            "below 0.5: the weights waste half of the batch",
        ),
        Metric(
            "rollout_corr/rollout_is_ratio_fraction_{high,low}",
            "share of ρ above `rollout_is_threshold`, and below its reciprocal",
            "share",
            "over tokens; with `sequence` over responses",
            "high: many weights are at the bound",
        ),
        Metric(
            "rollout_corr/rollout_is_seq_{mean,std,max,min,max_deviation}",
            "the mean weight of a response's tokens, and the largest distance of one from 1",
            "–",
            "over responses",
        ),
        Metric(
            "rollout_corr/rollout_is_seq_fraction_{high,low}",
            "share of responses whose mean ρ, before the bound, is above `rollout_is_threshold`, "
            "and below its reciprocal",
            "share",
            "over responses",
        ),
        Metric(
            "rollout_corr/rollout_is_batch_norm_factor",
            "divisor of the weights with `rollout_is_batch_normalize`: their mean, or 1 where that "
            "is below 1e-8",
            "–",
            "over tokens; with `sequence` over responses",
            "far from 1: the normalization changes the size of the loss",
        ),
        Metric(
            "rollout_corr/rollout_rs_{masked,seq_masked}_fraction "
            "rollout_corr/rollout_rs_{token,seq_sum,seq_mean,seq_max}_{k1,k2,k3}_{masked,seq_masked}_fraction",
            "share of tokens that are left out of the actor's loss, and of responses with such a "
            "token; with `rollout_rs` or a veto. With the name of a statistic: by that one alone",
            "share",
            "over tokens, over responses",
        ),
        Metric(
            "rollout_corr/rollout_rs_{token,seq_sum,seq_mean,seq_max}_{k1,k2,k3}_{mean,max,min,std}"
            " rollout_corr/rollout_rs_{token,seq_sum,seq_mean,seq_max}_{k1,k2,k3}_seq_"
            "{mean,std,max,min,max_deviation}",
            "the statistic, −log ρ for k1, of tokens; `seq_`: of responses, for `token_` of their "
            "means. std: clamped to the bounds; max_deviation: largest absolute value",
            "nats",
            "over tokens, over responses",
        ),
        Metric(
            "rollout_corr/rollout_rs_{token,seq_sum,seq_mean,seq_max}_{k1,k2,k3}_{,seq_}fraction_{high,low}",
            "share above and below the bounds of the statistic; `seq_`: of responses, for `token_` "
            "of their means",
            "share",
            "over tokens, over responses",
        ),
        Metric(
            "reshard/received_bytes",
            "bytes that rank 0 receives from other ranks in one weight update to vLLM",
            "bytes",
            "rank 0",
            "0 where the layouts agree",
        ),
        Metric(
            "reshard/sent_bytes",
            "bytes that rank 0 sends",
            "bytes",
            "rank 0",
            "the start of a run prints how even the senders are",
        ),
        Metric(
            "reshard/copied_bytes",
            "bytes that rank 0 copies within its own memory",
            "bytes",
            "rank 0",
            "redundant copies: training and vLLM each hold these blocks",
        ),
        Metric(
            "reshard/shared_bytes",
            "bytes of vLLM's parameters that alias Megatron-Core's storage (zero-copy)",
            "bytes",
            "rank 0",
            "all of them where the layouts agree",
        ),
    ],
    "vLLM sampled the tokens; Megatron-Core computes their log-probs again, with the same weights "
    "and temperature: before the update, or in the forward passes of the only one "
    "([algorithms.md](algorithms.md#old-log-probs)).\n"
    "With `algorithm.rollout_correction.bypass_mode` they are not compared, and the rows of both "
    "are missing.",
)
