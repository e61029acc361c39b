"""The groups that are generated over several steps: rollout.tail_batching starts more groups than a step needs and
generates the unfinished ones again, rollout.partial_rollout continues them with new weights. The engines are driven in
generate.py.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlhf_mc.config.schema import RolloutConfig
from rlhf_mc.data.batch import NOTHING, Generation, Prompt


@dataclass(frozen=True, eq=False)
class Group:
    """The rollout.n responses to one prompt, as far as they are generated."""

    position: int
    """Place in the order in which the run draws its prompts."""
    prompt: Prompt
    seeds: Sequence[int]
    responses: Sequence[Generation]
    versions: Sequence[np.ndarray]
    """The weights that drew each token of each response, as the last step that has updated them: [tokens] int32."""

    def has_ended(self, max_tokens: int) -> np.ndarray:
        """Return whether each response has ended: [n] bool."""
        return np.array([one.finished or len(one.token_ids) >= max_tokens for one in self.responses])

    @property
    def first_version(self) -> int | None:
        """The oldest weights that drew a token; None: nothing is generated."""
        return min((int(each[0]) for each in self.versions if len(each)), default=None)

    @property
    def fingerprint(self) -> int:
        """Of what a response depends on beside the weights: the prompt's tokens and the seeds."""
        return zlib.crc32(np.array(self.seeds, np.int64).tobytes(), zlib.crc32(self.prompt.token_ids.tobytes()))

    def span(self, version: int) -> int:
        """Return the number of versions from the group's first token to this one; 1 where nothing is generated."""
        return 1 if self.first_version is None else version - self.first_version + 1

    def restarted(self) -> Group:
        """Return the group with nothing generated."""
        n = len(self.responses)
        return replace(self, responses=[NOTHING] * n, versions=[np.zeros(0, np.int32)] * n)

    def continued(self, responses: Sequence[Generation], version: int) -> Group:
        """Return the group with these responses, whose new tokens were drawn by weights of this version."""
        versions = [
            np.concatenate([old, np.full(len(new.token_ids) - len(old), version, np.int32)])
            for old, new in zip(self.versions, responses, strict=True)
        ]
        return replace(self, responses=responses, versions=versions)


class GroupPool:
    """The groups that are begun and not trained on yet, the oldest first. The same on every rank."""

    def __init__(self) -> None:
        self.groups: Sequence[Group] = ()
        """A step replaces the sequence, and changes no group."""
        self.num_drawn = 0
        """Prompts that the run has drawn."""

    def copy(self) -> GroupPool:
        """Return a pool of the same groups, which the next step does not change."""
        pool = GroupPool()
        pool.groups = self.groups
        pool.num_drawn = self.num_drawn
        return pool

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return {
            "num_drawn": self.num_drawn,
            "positions": [group.position for group in self.groups],
            "fingerprints": [group.fingerprint for group in self.groups],
            "finished": [[one.finished for one in group.responses] for group in self.groups],
            "lens": [[len(one.token_ids) for one in group.responses] for group in self.groups],
            "tokens": _encode([one.token_ids for group in self.groups for one in group.responses], np.int32),
            "log_probs": _encode([one.log_probs for group in self.groups for one in group.responses], np.float32),
            "versions": _encode([each for group in self.groups for each in group.versions], np.int32),
        }


def load_groups(state: Mapping[str, Any], new_groups: Sequence[Group], max_tokens: int) -> list[Group]:
    """Return the groups of a state of GroupPool.state_dict. new_groups: those of its positions, with nothing generated.
    A response that is longer than max_tokens, which may be lower than when it was generated, is cut there. A group of
    another prompt or other seeds than its position has now has nothing generated: data or settings have changed."""
    tokens, log_probs, versions = (
        np.frombuffer(base64.b85decode(state[name]), dtype)
        for name, dtype in (("tokens", np.int32), ("log_probs", np.float32), ("versions", np.int32))
    )
    groups = []
    end = 0
    columns = (state["fingerprints"], state["lens"], state["finished"])
    for group, fingerprint, lens, finished in zip(new_groups, *columns, strict=True):
        responses = []
        of_versions = []
        for length, is_finished in zip(lens, finished, strict=True):
            cut = slice(end, end + min(length, max_tokens))
            end += length
            whole = is_finished and length <= max_tokens
            responses.append(Generation(tokens[cut].tolist(), log_probs[cut].tolist(), whole))
            of_versions.append(versions[cut])
        is_same = group.fingerprint == fingerprint
        groups.append(replace(group, responses=responses, versions=of_versions) if is_same else group)
    return groups


def _encode(vectors: Sequence[Any], dtype: type[np.generic]) -> str:
    """Return the vectors end to end as text."""
    parts = [np.asarray(vector, dtype) for vector in vectors]
    return base64.b85encode(np.concatenate(parts).tobytes() if parts else b"").decode()


def drop_stale(groups: Sequence[Group], version: int, cfg: RolloutConfig) -> list[Group]:
    """Return the groups that a step with weights of this version may continue. With max_off_policy_strategy drop a
    group whose tokens would be of more than max_off_policy_threshold versions is left out."""
    if cfg.max_off_policy_strategy != "drop":
        return list(groups)
    return [group for group in groups if group.span(version) <= cfg.max_off_policy_threshold]


def oldest_first(groups: Sequence[Group], version: int) -> list[Group]:
    """Return the groups by their oldest weights, those with nothing generated last. version: of the step's weights."""
    return sorted(groups, key=lambda group: -group.span(version))  # stable


def may_end(spans: np.ndarray, is_complete: np.ndarray, needed: int, size: int, cfg: RolloutConfig) -> bool:
    """Return whether a step may end, which trains on the first `needed` complete groups. With max_off_policy_strategy
    wait later steps, of `size` groups each, must be able to train on the others before they exceed
    max_off_policy_threshold.

    spans: [groups] Group.span in this step, the largest first. is_complete: [groups] bool."""
    taken = np.flatnonzero(is_complete)[:needed]
    if len(taken) < needed or cfg.max_off_policy_strategy != "wait" or is_complete.all():
        return len(taken) == needed
    others = np.delete(spans, taken)
    return bool((np.arange(len(others)) < (cfg.max_off_policy_threshold - others) * size).all())
