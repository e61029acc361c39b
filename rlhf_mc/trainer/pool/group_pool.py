"""The groups that are generated over several steps: rollout.tail_batching starts more groups than a
step needs and generates the unfinished ones again, rollout.partial_rollout continues them with new
weights. The engines are driven in generate.py.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_mc import json_files
from rlhf_mc.config.roles import sampling_versions
from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.data.batch import NOTHING, Generation, Prompt, RaggedBatch
from rlhf_mc.environments.conversation import ConversationState
from rlhf_mc.models.router_replay import ExpertReplay
from rlhf_mc.rewards.manager import ScoreStream

ScoredBatch = tuple[list[Prompt], RaggedBatch, ScoreStream]
"""The prompt of each response, the responses, and their scores to come."""


@dataclass(frozen=True, eq=False)
class Group:
    """The rollout.n responses to one prompt, complete or partial."""

    position: int
    """Place in the order in which the run draws its prompts."""
    prompt: Prompt
    seeds: Sequence[int]
    responses: Sequence[Generation]
    versions: Sequence[np.ndarray]
    """Weight version (last step that updated the weights) that sampled each token of each response:
    [tokens] int32. Tokens of an observation have the version at which it arrived."""
    conversations: Mapping[int, ConversationState] = field(default_factory=dict)
    """State of each started conversation, by its index in the group; empty without an
    environment."""

    def response_id(self, response: int) -> int:
        """Return the id of a response in the run."""
        return self.position * len(self.responses) + response

    def has_ended(self, max_tokens: int) -> np.ndarray:
        """Return whether each response has ended: [n] bool."""
        return np.array(
            [
                self.conversations[i].ended
                if i in self.conversations
                else response.finished or len(response.token_ids) >= max_tokens
                for i, response in enumerate(self.responses)
            ]
        )

    @property
    def first_version(self) -> int | None:
        """Oldest weight version that sampled a token; None: nothing is generated."""
        return min((int(versions[0]) for versions in self.versions if len(versions)), default=None)

    @property
    def fingerprint(self) -> int:
        """CRC-32 of the prompt's tokens and the seeds: all that responses depend on beside the
        weights."""
        return zlib.crc32(
            np.array(self.seeds, np.int64).tobytes(), zlib.crc32(self.prompt.token_ids.tobytes())
        )

    def span(self, version: int) -> int:
        """Return the number of versions from the group's first token to this one; 1 where nothing
        is generated."""
        return 1 if self.first_version is None else version - self.first_version + 1

    def restarted(self) -> Group:
        """Return the group with nothing generated."""
        n = len(self.responses)
        return replace(
            self, responses=[NOTHING] * n, versions=[np.zeros(0, np.int32)] * n, conversations={}
        )

    def continued(
        self,
        responses: Sequence[Generation],
        version: int,
        conversations: Mapping[int, ConversationState] | None = None,
    ) -> Group:
        """Return the group with these responses, whose new tokens were sampled with weights of this
        version. conversations: changed states."""
        versions = [
            np.concatenate([old, np.full(len(new.token_ids) - len(old), version, np.int32)])
            for old, new in zip(self.versions, responses, strict=True)
        ]
        conversations = {**self.conversations, **(conversations or {})}
        return replace(self, responses=responses, versions=versions, conversations=conversations)


POOL_FILE = "group_pool.npz"
"""File of a checkpoint with the groups of the pool."""
EXPERTS_FILE = "group_pool_experts_{}.npz"
"""File with a rank's stored experts of these groups."""


class GroupPool:
    """The started groups that no step has trained on yet, oldest first. The same on every rank."""

    def __init__(self) -> None:
        self.groups: Sequence[Group] = ()
        """A step replaces the sequence, and changes no group."""
        self.num_drawn = 0
        """Position of the next prompt that the run draws; 0 where it draws whole batches, without a
        pool."""
        self.next_batch: ScoredBatch | None = None
        """The batch of the first groups, which rollout.one_step_off has sampled for the next step;
        None: it is not sampled, or not by this process."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint, without the groups."""
        return {"num_drawn": self.num_drawn, "num_groups": len(self.groups)}

    def experts(self, by_number: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Return the experts of the pool's responses among those that a rank stores for router
        replay, by response id."""
        numbers = {
            group.response_id(i) for group in self.groups for i in range(len(group.responses))
        }
        return {number: by_number[number] for number in sorted(numbers & by_number.keys())}

    def files(self, rank: int, replay: ExpertReplay | None) -> dict[str, Callable[[Path], None]]:
        """Return by file name the functions that write this rank's part of a checkpoint: the
        present groups (rank 0), and the experts that the rank stores for them."""
        files: dict[str, Callable[[Path], None]] = {}
        if self.groups and rank == 0:
            files[POOL_FILE] = functools.partial(_write, self.groups)
        if replay is not None and (experts := self.experts(replay.stored)):
            files[EXPERTS_FILE.format(rank)] = functools.partial(_write_experts, experts)
        return files


def _write_experts(experts: Mapping[int, np.ndarray], path: Path) -> None:
    """Write experts to an .npz file: numbers and tokens of the responses [S], choices [T, layers,
    k] end to end."""
    parts = list(experts.values())
    np.savez(path, numbers=list(experts), lens=list(map(len, parts)), choices=np.concatenate(parts))


def load_experts(arrays: Mapping[str, np.ndarray], num_experts: int) -> dict[int, np.ndarray]:
    """Return the experts of the arrays of _write_experts. Raise ValueError or KeyError if they have
    other arrays."""
    choices = arrays["choices"]
    lens = arrays["lens"]
    if choices.dtype.kind != "u" or choices.ndim != 3 or (choices >= num_experts).any():
        raise ValueError(
            f"choices is {list(choices.shape)} {choices.dtype}, expected [tokens, layers, k] of "
            "experts"
        )
    if (lens < 0).any() or lens.sum() != len(choices):
        raise ValueError(f"lens is of {lens.sum()} tokens, choices of {len(choices)}")
    parts = np.split(choices, lens.cumsum()[:-1])
    return dict(zip(arrays["numbers"].tolist(), parts, strict=True))


def _write(groups: Sequence[Group], path: Path) -> None:
    """Write groups to an .npz file: arrays by group [G], by response [G, rollout.n], by token [R]
    end to end, and the versions of all tokens run-length coded."""
    responses = [response for group in groups for response in group.responses]
    versions = np.concatenate([of_tokens for group in groups for of_tokens in group.versions])
    starts = np.flatnonzero(np.diff(versions, prepend=-1))
    by_response = (len(groups), -1)
    np.savez(
        path,
        positions=np.array([group.position for group in groups]),
        seeds=np.array([group.seeds for group in groups]),
        fingerprints=np.array([group.fingerprint for group in groups]),
        finished=np.array([response.finished for response in responses]).reshape(by_response),
        lens=np.array([len(response.token_ids) for response in responses]).reshape(by_response),
        tokens=np.concatenate([np.array(response.token_ids, np.int32) for response in responses]),
        log_probs=np.concatenate(
            [np.array(response.log_probs, np.float32) for response in responses]
        ),
        versions=versions[starts],
        version_lens=np.diff(starts, append=len(versions)),
        conversations=json.dumps(
            [{i: asdict(state) for i, state in group.conversations.items()} for group in groups]
        ),
    )


def check_arrays(
    arrays: Mapping[str, np.ndarray], num_groups: int, num_drawn: int, step: int, vocab_size: int
) -> None:
    """Raise ValueError or KeyError if the arrays are not as _write makes them after a step, of
    num_groups groups at positions below num_drawn."""

    def check(
        name: str, kind: str, shape: tuple[int, ...], least: float, most: float
    ) -> np.ndarray:
        array = arrays[name]
        if array.dtype.kind not in kind or array.shape != shape:
            raise ValueError(f"{name} is {list(array.shape)} {array.dtype}, expected {list(shape)}")
        if not ((least <= array) & (array <= most)).all():
            raise ValueError(f"{name} has numbers that are not between {least} and {most}")
        return array

    of_response = (num_groups, arrays["lens"].shape[-1])
    lens = check("lens", "i", of_response, 0, 10_000_000)
    check("finished", "b", of_response, False, True)
    positions = check("positions", "i", (num_groups,), 0, num_drawn - 1)
    check("fingerprints", "i", (num_groups,), 0, 2**32 - 1)
    if "seeds" in arrays:  # not in files of earlier versions
        check("seeds", "iu", of_response, 0, np.inf)
    check("tokens", "i", (lens.sum(),), 0, vocab_size - 1)
    check("log_probs", "f", (lens.sum(),), -np.inf, np.inf)
    versions = check("versions", "i", arrays["version_lens"].shape, 0, step)
    runs = check("version_lens", "i", (len(versions),), 1, lens.sum())
    if len({*positions.tolist()}) < num_groups or runs.sum() != lens.sum():
        raise ValueError("a position twice, or versions of another number of tokens")


def load_groups(
    arrays: Mapping[str, np.ndarray],
    new_groups: Sequence[Group],
    max_tokens: int,
    has_environment: bool,
) -> list[Group]:
    """Return the groups of the arrays of _write. new_groups: those of its positions, with nothing
    generated. A response that is longer than max_tokens, which may be lower than when it was
    generated, is cut there. A group has nothing generated if its position now has another prompt or
    another number of responses, if the run had an environment and has none or the reverse, or if a
    longer response is a conversation: data or settings have changed. Seeds are those of the file,
    since new ones depend on data.train_batch_size."""
    tokens = arrays["tokens"]
    log_probs = arrays["log_probs"]
    versions = np.repeat(arrays["versions"], arrays["version_lens"])
    groups = []
    end = 0
    columns = (arrays[name].tolist() for name in ("fingerprints", "lens", "finished"))
    # Files of earlier versions have no seeds.
    seeds = arrays["seeds"].tolist() if "seeds" in arrays else [group.seeds for group in new_groups]
    states = json_files.parse(str(arrays["conversations"]))
    for new, its_seeds, fingerprint, lens, finished, of_group in zip(
        new_groups, seeds, *columns, states, strict=True
    ):
        group = replace(new, seeds=its_seeds)
        responses = []
        of_versions = []
        for length, is_finished in zip(lens, finished, strict=True):
            cut = slice(end, end + min(length, max_tokens))
            end += length
            whole = is_finished and length <= max_tokens
            responses.append(Generation(tokens[cut].tolist(), log_probs[cut].tolist(), whole))
            of_versions.append(versions[cut])
        conversations = {
            i: ConversationState.from_dict(of_group[str(i)], length)
            for i, length in enumerate(lens)
            if str(i) in of_group
        }
        is_same = group.fingerprint == fingerprint and len(its_seeds) == len(new.seeds)
        if (
            not is_same
            or has_environment != bool(conversations)
            or (conversations and max(lens) > max_tokens)
        ):
            groups.append(new)
        else:
            groups.append(
                replace(
                    group, responses=responses, versions=of_versions, conversations=conversations
                )
            )
    return groups


def drop_stale(groups: Sequence[Group], version: int, cfg: RolloutConfig) -> list[Group]:
    """Return the groups that weights of this version may continue. With max_off_policy_strategy
    drop a group that more than sampling_versions have sampled is left out."""
    if cfg.max_off_policy_strategy != "drop":
        return list(groups)
    return [group for group in groups if group.span(version) <= sampling_versions(cfg)]


def oldest_first(groups: Sequence[Group], version: int) -> list[Group]:
    """Return the groups by their oldest weights, those with nothing generated last. version: of the
    step's weights."""
    return sorted(groups, key=lambda group: -group.span(version))  # stable


def may_end(
    spans: np.ndarray, is_complete: np.ndarray, needed: int, size: int, cfg: RolloutConfig
) -> bool:
    """Return whether a step may end, which trains on the first `needed` complete groups. With
    max_off_policy_strategy wait later steps, of `size` groups each, must be able to train on the
    others before they exceed sampling_versions.

    spans: [groups] Group.span in this step, the largest first. is_complete: [groups] bool."""
    taken = np.flatnonzero(is_complete)[:needed]
    if len(taken) < needed or cfg.max_off_policy_strategy != "wait" or is_complete.all():
        return len(taken) == needed
    others = np.delete(spans, taken)
    return bool((np.arange(len(others)) < (sampling_versions(cfg) - others) * size).all())
