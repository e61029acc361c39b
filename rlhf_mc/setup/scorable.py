"""The check, before training starts, that each prompt can be scored: its data source has a rule,
the rule a reference answer to compare with, and a reward model's chat template accepts the prompt.
Lines say which special tokens rules and functions see.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection

from transformers import PreTrainedTokenizerBase

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import Config
from rlhf_mc.data.batch import Prompt
from rlhf_mc.data.conversations import ConversationTokenizer
from rlhf_mc.data.dataset import Prompts
from rlhf_mc.data.prompts import NAMED
from rlhf_mc.data.tokenizer import THINK_TAGS
from rlhf_mc.rewards.manager import RewardManager, SpecialTokenTexts
from rlhf_mc.rewards.mixture import check_sources
from rlhf_mc.rewards.registry import RULES
from rlhf_mc.runtime.console import global_rank, print_line
from rlhf_mc.topology.consensus import gather_objects, my_share
from rlhf_mc.trainer.teachers import check_taught

_READ_TOGETHER = 1000
"""Prompts that check_mixture reads together."""

logger = logging.getLogger(__name__)


def scorable(
    rewards: RewardManager,
    prompts: Prompts,
    on_bad_row: str,
    training: bool,
    conversations: Collection[ConversationTokenizer] = (),
    teachers: Collection[str | None] = (),
) -> Prompts:
    """Return the prompts that can be scored: by the rewards, by the chat template of each reward
    model in `conversations`, and by a teacher. teachers: the data sources that have one; None among
    them: all do. With on_bad_row "error" raise UserError, with file and row, for the first prompt
    that cannot; with "skip" leave them out, with a warning. Each rank checks a part: every rank
    must call it."""

    def check(some: list[Prompt]) -> None:
        rewards.check(some, training)
        if teachers and None not in teachers:
            check_taught(some, teachers)
        for conversation in conversations:
            for prompt in some:
                conversation.text(prompt, "")

    problems: dict[int, str] = {}
    share = my_share(len(prompts))
    for rank_problems in gather_objects(_problems(check, prompts, share, on_bad_row == "error")):
        problems |= rank_problems
    if not problems:
        return prompts
    first = next(iter(problems.values()))
    if on_bad_row == "error":
        raise UserError(first)
    if len(problems) == len(prompts):
        raise UserError(f"all {len(prompts)} prompts are skipped (data.on_bad_row): {first}")
    if global_rank() == 0:
        named = "; ".join(list(problems.values())[:NAMED]) + (
            "; ..." if len(problems) > NAMED else ""
        )
        logger.warning(
            "%d of %d prompts skipped (data.on_bad_row): %s", len(problems), len(prompts), named
        )
    return prompts.without(problems)


def print_special_tokens(
    cfg: Config, rewards: RewardManager, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Print, on rank 0, which rules read special tokens of the tokenizer, and whether the tags of
    thoughts are special tokens that a function or environment of the user's does not see."""
    for part, read in SpecialTokenTexts(tokenizer, rewards.special_tokens).read.items():
        if read and part in rewards.mixture.listed_parts and part in RULES:
            line = (
                f"reward.mixture: {part} gets responses with the special tokens {', '.join(read)}"
            )
            print_line(f"{line}, which it reads", rank_0_only=True)
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    tags = [tag for tag in THINK_TAGS if tag in special]
    for section, is_set, skips in (
        (
            "custom_reward_function",
            cfg.custom_reward_function.path,
            cfg.custom_reward_function.skip_special_tokens,
        ),
        (
            "rollout.environment",
            cfg.rollout.environment.path,
            cfg.rollout.environment.skip_special_tokens,
        ),
    ):
        if tags and is_set and skips:
            print_line(
                f"warning: {section} gets responses without {' and '.join(tags)}, which are "
                f"special tokens of the tokenizer; {section}.skip_special_tokens=false keeps them",
                rank_0_only=True,
            )


def check_mixture(listed: Collection[str], *read: Prompts) -> None:
    """Raise UserError if reward.mixture lists a data source that no prompt has. listed:
    reward.mixture's sources. Each rank reads its part until it has seen all of them: every rank
    must call it."""
    if not listed:
        return
    sources: set[str] = set()
    for prompts in read:
        share = my_share(len(prompts))
        for first in range(share.start, share.stop, _READ_TOGETHER):
            if sources.issuperset(listed):
                break
            sources |= {
                prompt.data_source
                for prompt in prompts[first : min(first + _READ_TOGETHER, share.stop)]
            }
    check_sources(listed, set().union(*gather_objects(sources)))


def _problems(
    check: Callable[[list[Prompt]], None], prompts: Prompts, share: range, only_first: bool
) -> dict[int, str]:
    """Return by index the problems of these prompts, in order."""
    problems: dict[int, str] = {}
    with contextlib.suppress(UserError):
        check(prompts[share.start : share.stop])
        return problems
    for index in share:
        try:
            check([prompts[index]])
        except UserError as error:
            problems[index] = str(error)
            if only_first:
                break
    return problems
