"""Metrics of the run's progress, of validation, of rewards and advantages, and of groups."""

from __future__ import annotations

from rlhf_mc.observability.catalog.metric import Metric, Section

PROGRESS = Section(
    "Progress of the run",
    [
        Metric("training/global_step", "PPO steps done", "steps", "–"),
        Metric(
            "training/epoch",
            "pass over the training prompts that the step's last batch belongs to, from 0",
            "epochs",
            "–",
        ),
        Metric(
            "health/num_active",
            "health rules that count in this step; the run's health file names them",
            "count",
            "rank 0 decides",
            "above 0: lines of `rlhf_mc: health` say why",
        ),
        Metric(
            "val-core/<data_source>/acc/mean@N",
            "share of that data source's validation questions answered correctly, N = "
            "`rollout.val_kwargs.n` responses each",
            "share",
            "mean over a prompt's N responses, then over prompts",
            "the goal of the run",
        ),
        Metric(
            "val-core/<data_source>/acc/best@N/{mean,std}",
            "expected accuracy of the best of N responses drawn with replacement from the N, and "
            "its deviation over 1000 bootstrap draws (verl's draws)",
            "share",
            "over draws, then mean over prompts",
            "far above mean@N: the model can, but rarely does",
        ),
        Metric(
            "val-core/<data_source>/acc/maj@N/{mean,std}",
            "the same of the answer that most of the drawn responses give; where the rule finds an "
            "answer, or the user's function returns `pred`",
            "share",
            "over draws, then mean over prompts",
            "below mean@N: a common mistake",
        ),
        Metric(
            "val-aux/<data_source>/acc/pass@k",
            "probability that one of k responses is right, drawn without replacement (arXiv "
            "2107.03374); k = 2, 4, 8, ..., N; where the accuracy of all responses of the data "
            "source is 0 or 1",
            "share",
            "mean over prompts",
        ),
        Metric(
            "val-aux/<data_source>/acc/std@N "
            "val-aux/<data_source>/acc/{worst@k,best@k,maj@k}/{mean,std}",
            "deviation over a prompt's responses; the worst of k; best and majority for k below N",
            "share",
            "over responses or draws, then mean over prompts",
        ),
        Metric(
            "val-aux/<data_source>/<name>/{mean@N,std@N,pass@k} "
            "val-aux/<data_source>/<name>/{best@k,worst@k,maj@k}/{mean,std}",
            "the same statistics of `reward`, the score, and of each further number that the "
            "reward function returns",
            "of the number",
            "over responses or draws, then mean over prompts",
        ),
        Metric(
            "val-aux/num_turns/{mean,max,min}",
            "turns of a conversation, with `rollout.environment`",
            "turns",
            "over validation responses",
        ),
        Metric(
            "val-aux/<data_source>/num_failed",
            "validation responses that could not be scored; only where there are any",
            "count",
            "sum over responses",
            "above 0: the warnings name file and row",
        ),
    ],
)

REWARDS = Section(
    "Rewards and advantages",
    [
        Metric(
            "critic/score/{mean,max,min}",
            "reward function's score of a response",
            "score",
            "over responses",
            "should rise",
        ),
        Metric(
            "critic/score/<data_source>/{mean,max,min}",
            "the same of one data source",
            "score",
            "over the data source's responses",
        ),
        Metric(
            "critic/rewards/{mean,max,min}",
            "a response's summed token rewards: its score less the KL penalty (with "
            "`algorithm.use_kl_in_reward`)",
            "score",
            "over responses",
            "much below the score: the KL penalty dominates",
        ),
        Metric(
            "critic/advantages/{mean,max,min}",
            "advantage of a token as the estimator defines it; `gae` and `reinforce_plus_plus` "
            "whiten it over the batch (mean 0, standard deviation 1)",
            "score, or standard deviations",
            "over tokens",
            "extremes beyond about 10: a few tokens carry the update",
        ),
        Metric(
            "critic/returns/{mean,max,min}",
            "return of a token, the target of the critic's update; without a critic of "
            "`reinforce_plus_plus` and `remax` only",
            "score",
            "over tokens",
        ),
        Metric(
            "critic/greedy_score/{mean,max,min}",
            "score of the response at temperature 0, with `remax`",
            "score",
            "over responses",
            "`critic/score/mean` should stay near it",
        ),
        Metric(
            "critic/values/{mean,max,min}",
            "critic's value of the state before a token, from before the update; with a critic",
            "score",
            "over tokens",
            "should come to resemble the returns",
        ),
        Metric(
            "critic/vf_explained_var",
            "1 − Var(returns − values) / Var(returns)",
            "–",
            "variances over tokens",
            "towards 1; at or below 0 the critic predicts nothing",
        ),
        Metric(
            "reward/<data_source>/<part>",
            "weight × score of a part ([rewards.md](rewards.md)); the parts sum to "
            "`critic/score/<data_source>/mean`",
            "score",
            "mean over the data source's responses",
            "one part grows at the cost of another",
        ),
        Metric(
            "reward_extra/<data_source>/<name>",
            "a further number that a reward function or an environment returned, such as `acc`",
            "of the number",
            "mean over the data source's responses that have it",
        ),
        Metric(
            "train/equal_groups_ratio",
            "share of the prompts whose responses all have the same score; with `rollout.n` above "
            "1",
            "share",
            "over prompts",
            "near 1: an estimator that compares a prompt's responses has nothing to learn from",
        ),
        Metric(
            "train/masked_samples_ratio",
            "share of the step's responses that are not trained on "
            "([rewards.md](rewards.md#responses-that-are-not-trained-on)); `critic/*` is of the "
            "others",
            "share",
            "over responses",
            "a rise: environments or reward functions fail, or responses are truncated",
        ),
        Metric(
            "num_turns/{mean,max,min}",
            "turns of a conversation, with `rollout.environment`",
            "turns",
            "over responses",
            "at `max_turns`: conversations do not come to an end",
        ),
        Metric(
            "environment/failed_calls",
            "turns that an environment has not answered, and calls of tools that failed, with "
            "`rollout.environment`",
            "count",
            "sum over responses",
            "above 0: the warnings say why",
        ),
        Metric(
            "environment/failed_calls_ratio",
            "the same for each turn",
            "share",
            "over turns",
            "above 0.1: the health rule `calls_failing`",
        ),
        Metric(
            "environment/failed_calls/{raised,timeout,exited,invalid,masked}",
            "the same by kind; only where there are any",
            "count",
            "sum over responses",
        ),
        Metric(
            "reward/num_failed",
            "responses that could not be scored and have `reward.default_score`, or whose "
            "environment has failed",
            "count",
            "sum over responses",
            "above 0: the warnings name file and row",
        ),
        Metric(
            "reward/num_truncated/<part>",
            "conversations that were too long for a reward model with its own tokenizer, and lost "
            "their first tokens",
            "count",
            "sum over responses",
            "above 0: the model does not see all of the prompt",
        ),
        Metric(
            "reward/<data_source>/num_failed/{raised,timeout,exited,invalid,endpoint,no_rule,masked}",
            "`reward/num_failed` of one data source by kind",
            "count",
            "sum over the data source's responses",
        ),
    ],
)

GROUPS = Section(
    "Groups",
    [
        Metric(
            "train/num_gen_batches",
            "batches of `data.gen_batch_size` prompts that the step has drawn",
            "count",
            "sum over the step",
            "a rise towards `max_num_gen_batches`: the prompts become too easy, or are too hard",
        ),
        Metric(
            "train/dropped_groups_ratio",
            "share of the drawn groups whose responses are all alike in the metric",
            "share",
            "over drawn groups",
        ),
        Metric(
            "train/surplus_groups_ratio",
            "share of the drawn groups that differ and are not needed",
            "share",
            "over drawn groups",
            "high: lower `data.gen_batch_size`",
        ),
    ],
    "Only with `algorithm.filter_groups`. The step's batch is then the groups that are kept, and "
    "so is "
    "`critic/score/*`.\nThe scores by data source, `reward/*` and `reward_extra/*` are of all "
    "responses that the step "
    "has drawn,\ndropped groups included.",
)
