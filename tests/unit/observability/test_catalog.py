"""The declarations of metrics: which keys each one stands for, and that every one is complete."""

from __future__ import annotations

import re
from fnmatch import fnmatch

import pytest
from documents import ROOT

from rlhf_mc.observability.catalog import Metric, expanded, find, sections, undeclared

METRICS = [metric for section in sections() for metric in section.metrics]
_IS = (
    "{mean,std,max,min,eff_sample_size,ratio_fraction_high,ratio_fraction_low,batch_norm_factor,"
    "oob_ratio}"
)
_SEQUENCES = (
    "{seq_mean,seq_std,seq_max,seq_min,seq_max_deviation,seq_fraction_high,seq_fraction_low}"
)
_REJECTED = "{masked_fraction,seq_masked_fraction}"
VERLS_METRICS = f"""
training/{{global_step,epoch}}
critic/{{score,rewards,advantages,returns,values}}/{{mean,max,min}} critic/vf_explained_var
critic/{{vf_loss,vf_clipfrac,vpred_mean,grad_norm,lr,loss}}
{{response_length,response_length_non_aborted,prompt_length}}/{{mean,max,min,clip_ratio}} response/aborted_ratio
actor/{{loss,pg_loss,pg_clipfrac,pg_clipfrac_lower,ppo_kl,entropy,entropy_loss,kl_loss,kl_coef,grad_norm,lr}}
actor/{{reward_kl_penalty,reward_kl_penalty_coeff}}
training/rollout_probs_diff_{{valid,max,mean,std}} training/rollout_actor_probs_pearson_corr
rollout_corr/{{kl,k3_kl,training_ppl,training_log_ppl,rollout_ppl,rollout_log_ppl,ppl_ratio,chi2_token,chi2_seq}}
rollout_corr/log_ppl_{{diff,abs_diff,diff_max,diff_min}}
rollout_corr/rollout_is_{_IS} rollout_corr/rollout_is_{_SEQUENCES}
rollout_corr/rollout_rs_{_REJECTED} rollout_corr/rollout_rs_token_k1_{_REJECTED}
rollout_corr/rollout_rs_token_k1_{_SEQUENCES}
rollout_corr/rollout_rs_token_k1_{{mean,max,min,std,fraction_high,fraction_low}}
global_seqlen/{{min,max,mean,minmax_diff,balanced_min,balanced_max}}
timing_s/{{gen,gen_max,reward,old_log_prob,ref,values,adv,update_critic,update_actor,update_weights,save_checkpoint}}
timing_s/{{testing,step,start_profile,stop_profile,dump_rollout_generations}}
timing_s/agent_loop/{{generate_sequences,tool_calls,compute_score,num_preempted}}/{{mean,max,min}}
timing_s/agent_loop/slowest/{{generate_sequences,tool_calls,compute_score,num_preempted,prompt_length,response_length}}
timing_s/generation_timing/{{max,min,topk_ratio}}
timing_per_token_ms/{{gen,ref,values,adv,update_critic,update_actor}}
perf/{{total_num_tokens,time_per_step,throughput,mfu/actor,mfu/critic,mfu/actor_infer}}
perf/{{max_memory_allocated_gb,max_memory_reserved_gb,cpu_memory_used_gb}}
{{actor,critic}}/perf/{{max_memory_allocated_gb,max_memory_reserved_gb,cpu_memory_used_gb}}
{{num_turns,training/num_turns,val-aux/num_turns}}/{{mean,max,min}} tool_call_counts/{{mean,max,min}}
training/off_policy/{{trajectory_spans,trajectory_staleness,trajectory_staleness_worst}}/{{mean,max,min}}
{{training,validation}}/{{off_policy,filter_groups,rollout_failure}}/evicted_samples
{{training,validation}}/off_policy/evicted_samples_staleness/{{mean,max,min}}
{{training,validation}}/filter_groups/discarded_surplus_samples
rollout/moe/{{routed_experts_found,routed_expert_assignments}} rollout/{{spec_accept_rate,spec_accept_length}}
variance_proxy/{{proxy1_signal_strength,proxy2_total_power,proxy3_pure_noise,expected_a_squared,expected_w}}
"""  # noqa: E501
"""Metrics of verl's PPO loop on one turn of text, and of its timing in earlier versions."""


@pytest.mark.parametrize(
    ("key", "declared_as"),
    [
        ("actor/ppo_kl", "actor/ppo_kl"),
        ("critic/skipped", "{actor,critic}/skipped"),
        ("critic/score/mean", "critic/score/{mean,max,min}"),
        ("critic/score/openai/gsm8k/mean", "critic/score/<data_source>/{mean,max,min}"),
        ("val-core/openai/gsm8k/acc/maj@16/std", "val-core/<data_source>/acc/maj@N/{mean,std}"),
        ("val-aux/math/reward/worst@2/mean", "val-aux/<data_source>/<name>/{mean@N"),
        ("reward/math/num_failed/timeout", "reward/<data_source>/num_failed/{raised"),
        ("reward/math/length", "reward/<data_source>/<part>"),
        ("reward/num_failed", "reward/num_failed"),
        ("memory/reward_models.big_offloaded_gb", "memory/{actor,"),
    ],
)
def test_a_key_has_its_most_specific_declaration(key: str, declared_as: str) -> None:
    metric = find(key)
    assert metric is not None and metric.keys.startswith(declared_as)


@pytest.mark.parametrize(
    "key",
    [
        "actor/ppo",
        "actor/ppo_kl2",
        "actor/my_statistic",
        "critic/score/",
        "val-core/gsm8k/acc/mean@",
        "loss",
    ],
)
def test_other_keys_are_undeclared(key: str) -> None:
    assert undeclared([key, "actor/loss"]) == [key]


def test_each_metric_has_its_texts_and_one_row_of_the_page() -> None:
    for metric in METRICS:
        texts = (metric.keys, metric.meaning, metric.unit, metric.reduction)
        assert all(texts), metric.keys
        assert not any(re.search(r"[|\n]", text) for text in (*texts, metric.watch_for)), (
            metric.keys
        )
    keys = [metric.keys for metric in METRICS]
    assert len(set(keys)) == len(keys)


def test_a_character_with_a_meaning_in_patterns_stands_for_itself() -> None:
    metric = Metric("timing_s/models.<name> a+b", "", "", "")
    assert metric.matches("timing_s/models.x") and metric.matches("a+b")
    assert not metric.matches("timing_s/modelsXx") and not metric.matches("aab")


def test_verls_metrics_have_their_names_or_a_row_that_says_why_not() -> None:
    """Compare with the table in docs/from_verl.md, whose rows name absent metrics alone."""
    _, _, section = (ROOT / "docs" / "from_verl.md").read_text().partition("\n## Metrics\n")
    rows = re.findall(
        r"^\| ([\w/{},* ]+/[\w/{},* ]+) \|", section.partition("\n## ")[0], re.MULTILINE
    )
    absent = [name for row in rows for key in row.split() for name in expanded(key)]
    assert len(absent) > 10
    verls = [name for key in VERLS_METRICS.split() for name in expanded(key)]
    assert len(set(verls)) == len(verls) > 100
    for name in verls:
        patterns = [pattern for pattern in absent if fnmatch(name, pattern)]
        assert bool(patterns) != (find(name) is not None), (name, patterns)
    assert [
        pattern for pattern in absent if not any(fnmatch(name, pattern) for name in verls)
    ] == []
