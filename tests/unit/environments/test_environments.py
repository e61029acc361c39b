"""Environments in real worker processes: conversations through turns.py without an engine, and the
faults of a user's environment."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs, to_builtins
from transformers import AddedToken

from rlhf_mc.config.environment_schema import EnvironmentConfig
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.schema import DataConfig
from rlhf_mc.data.batch import NOTHING, OBSERVED, Generation, Prompt
from rlhf_mc.environments import environment_manager
from rlhf_mc.environments.conversation import ConversationState
from rlhf_mc.environments.environment_manager import EnvironmentManager
from rlhf_mc.environments.environment_worker import EnvironmentsOfWorker, Turn
from rlhf_mc.environments.journal import CallEnd, ObservationJournal, Reply, TurnAnswer, TurnId
from rlhf_mc.environments.protocol import StepResult, truncated
from rlhf_mc.environments.template import ObservationTokenizer
from rlhf_mc.environments.turns import Conversations
from rlhf_mc.rewards.results import Episode
from rlhf_mc.rollout.base import Arrivals, Request, Sampling
from rlhf_mc.run_files import checked_line

USER_FILE = """
import asyncio, time

class Environment:
    def __init__(self, kind="echo"):
        self.kind = kind
        self.turn = 0

    def reset(self, row):
        self.number = row["ground_truth"]
        if self.kind == "begins":
            return [{"role": "user", "content": "go" if self.number else "x" * 99}]
        if self.kind == "never begins":
            raise OSError("no game")

    async def step(self, response, token_ids):
        self.turn += 1
        is_faulty = self.number == 1 and self.turn == (1 if self.kind == "blocks" else 2)
        kind = self.kind if is_faulty else "echo"
        if kind == "raises":
            raise SystemExit("no more <stop>")
        if self.kind == "says":
            return f"<stop>{response}", 0.0, self.turn == 2, {}
        if kind == "hangs":
            await asyncio.sleep(60)
        if kind == "blocks":
            time.sleep(60)
        if kind == "wrong":
            return b"7", 0.0, False, {}
        if kind == "no token":
            return [10**12], 0.0, False, {}
        if kind == "done":
            return "7", 0.0, "no", {}
        if kind == "megabyte":
            return "m" * 2**20, 0.0, False, {}
        return [*token_ids, 9], 1.0, self.turn == 3, {"turn": self.turn}
"""


STOP = 0x110000


class Letters:
    """A tokenizer whose tokens are the letters' code points, and one for the control token
    <stop>."""

    chat_template = ""
    is_fast = False
    added_tokens_decoder = {0x110000: AddedToken("<stop>", special=True)}

    def __len__(self) -> int:
        return 0x110001

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        stop = "" if skip_special_tokens else "<stop>"
        return "".join(stop if token == STOP else chr(token) for token in tokens)

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        parts = re.split("(<stop>)", text)
        return {
            "input_ids": [
                token
                for part in parts
                for token in ([STOP] if part == "<stop>" else map(ord, part))
            ]
        }

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tokenize: bool,
        add_generation_prompt: bool,
        tools: Sequence[Any] = (),
    ) -> str:
        """Render as models with tools do: a response that is followed by another message has no
        thoughts."""
        text = f"<tools>{json.dumps(tools, ensure_ascii=False)}" * bool(tools)
        for i, one in enumerate(messages):
            if one["role"] == "tool" and not any("tool_calls" in before for before in messages[:i]):
                raise ValueError("an answer without its call")
            for call in one.get("tool_calls", ()):
                text += call["function"]["arguments"] + call["id"]  # a text alone
            thoughts = "hm" if one["role"] == "assistant" and one is messages[-1] else ""
            text += f"<{one['role']}>{thoughts}{one['content']}\2\n"
        return text + "<assistant>" * add_generation_prompt


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(environment_manager, "dist", SimpleNamespace(get_rank=lambda: 0))
    path = tmp_path / "environment.py"
    path.write_text(USER_FILE)
    return str(path)


def begun(
    cfg: EnvironmentConfig,
    limit: int = 60,
    replayed: str | None = None,
    directory: Path | None = None,
    **fields: Any,
) -> tuple[EnvironmentManager, Conversations]:
    """Return two conversations, whose prompts have the ground truths 0 and 1, and these fields.
    Their journal is beside the file."""
    cfg.num_workers = cfg.num_workers or 1
    data = DataConfig(train_files=[], max_response_length=limit)
    path = Path(str(cfg.path or cfg.function_tool_path or cfg.tool_config_path))
    directory = directory or path.parent
    journal = ObservationJournal(directory, replayed, 0, 0, STOP + 1, limit)
    environments = EnvironmentManager(cfg, data, Letters(), (2,), journal)  # type: ignore[arg-type]
    environments.connect([[0]])
    prompts = [Prompt(i, np.array([5, 6], np.int32), "source", i, **fields) for i in range(2)]
    requests = [Request(i, prompt.token_ids, i, NOTHING) for i, prompt in enumerate(prompts)]
    sampling = Sampling(1.0, limit, (2,))
    return environments, Conversations(environments, requests, prompts, sampling=sampling)


def prompts_of(conversations: Conversations) -> list[Prompt]:
    return [one.prompt for one in conversations._all]


def played(
    conversations: Conversations, turns: Sequence[str] = ("\3",) * 100, num_played: int = 2
) -> dict[int, Generation]:
    """Play the first conversations to their ends: the model draws these turns, each with the end
    token 2."""
    ended: dict[int, Generation] = {}
    texts = [iter(turns) for _ in conversations.requests]
    seconds = 30.0
    running = conversations.start(conversations.requests[:num_played])
    deadline = time.monotonic() + seconds
    while len(ended) < num_played:
        assert time.monotonic() < deadline, "a conversation waits"
        finished = {}
        for request in running:
            room = (request.max_tokens or 0) - len(request.partial.token_ids)
            drawn = [*Letters()(next(texts[request.number]), False)["input_ids"], 2][:room]
            tokens = [*request.partial.token_ids, *drawn]
            log_probs = [*request.partial.log_probs, *[-1.0] * len(drawn)]
            finished[request.number] = Generation(tokens, log_probs, finished=drawn[-1] == 2)
        if finished:
            conversations.submit(finished)
        arrivals = conversations.receive(is_idle=True)
        ended |= arrivals.ended
        running = list(arrivals.requests)
    assert conversations.num_waiting == 0
    return ended


def test_conversation_appends_observations_until_the_end(user_file: str) -> None:
    environments, conversations = begun(EnvironmentConfig(user_file, num_workers=2))
    ended = played(conversations)
    # The environment answers a turn with its own tokens and a 9, and ends with the third turn.
    assert ended[0].token_ids == ended[1].token_ids == [3, 2, 3, 2, 9] * 2 + [3, 2]
    marks = [log_prob == OBSERVED for log_prob in ended[0].log_probs]
    assert marks == [False, False, True, True, True] * 2 + [False, False] and ended[0].finished
    rewards = [(1, 1.0), (3, 1.0), (5, 1.0)]
    assert conversations.episode(0) == Episode(
        rewards, {"turn": 3.0}, {}, None, 0.0, [(2, 5), (7, 10)]
    )
    conversations = Conversations(environments, conversations.requests, prompts_of(conversations))
    conversations.start(conversations.requests)
    conversations.submit({1: Generation([3, 2], [-1.0, -1.0], True)})
    assert conversations.abort() == {1: Generation([3, 2], [-1.0, -1.0], True)}
    assert [(one.waits, one.ended) for one in conversations.states().values()] == [
        (False, False),
        (True, False),
    ]
    environments.close()


@pytest.mark.parametrize(
    ("skips", "splits"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_control_tokens_in_texts_are_kept_where_a_setting_says_so(
    user_file: str, skips: bool, splits: bool
) -> None:
    settings = {"skip_special_tokens": skips, "split_special_tokens": splits}
    environments, conversations = begun(
        EnvironmentConfig(user_file, kwargs={"kind": "says"}, **settings)
    )
    ended = played(conversations, ["a<stop>", "b"])
    text = "<stop>a\2" if skips else "<stop>a<stop>\2"
    observation = [*map(ord, text)] if splits else Letters()(text, False)["input_ids"]
    assert ended[0].token_ids == [ord("a"), STOP, 2, *observation, ord("b"), 2]
    environments.close()


def test_the_default_observation_has_control_tokens_and_its_reason_none(user_file: str) -> None:
    cfg = EnvironmentConfig(
        user_file, kwargs={"kind": "raises"}, default_observation="<stop>{error}"
    )
    environments, conversations = begun(cfg, limit=100)
    ended = played(conversations)
    assert ended[1].token_ids.count(STOP) == 1 and "no more <stop>" in Letters().decode(
        ended[1].token_ids
    )
    environments.close()


@pytest.mark.parametrize(
    ("cfg", "limit", "tokens", "finished"),
    [
        ({"max_turns": 2}, 60, [3, 2, 3, 2, 9, 3, 2], True),
        ({"max_tokens_per_turn": 1, "max_turns": 2}, 60, [3, 3, 9, 3], True),
        (
            {"max_observation_length": 2, "truncate": "left", "max_turns": 2},
            60,
            [3, 2, 2, 9, 3, 2],
            True,
        ),
        ({}, 7, [3, 2, 3, 2, 9, 3, 2], True),  # the end token is the last that fits
        ({}, 6, [3, 2, 3, 2, 9, 3], False),
        ({}, 4, [3, 2, 3, 2], False),  # a cut observation
    ],
)
def test_limits_of_a_conversation(
    user_file: str, cfg: dict[str, Any], limit: int, tokens: list[int], finished: bool
) -> None:
    environments, conversations = begun(EnvironmentConfig(user_file, **cfg), limit)
    ended = played(conversations)
    assert ended[0].token_ids == tokens and ended[0].finished == finished
    environments.close()


def test_a_replay_of_other_conversations_is_one_line(user_file: str) -> None:
    """Check a turn of other tokens, and observations that no conversation waits for. A replay calls
    no environment."""
    environments, conversations = begun(EnvironmentConfig(user_file))
    ended = played(conversations)
    conversations.finish()
    environments.close()
    Path(user_file).write_text(USER_FILE.replace("self.turn += 1", "raise SystemExit"))
    environments, conversations = begun(
        EnvironmentConfig(user_file), replayed=str(Path(user_file).parent)
    )
    assert played(conversations) == ended
    conversations.finish()
    for kwargs, problem in (
        (
            {"turns": ("\3\3",) * 100},
            "step 0, row 1, turn 1: the runs have drawn other tokens: are model",
        ),
        (
            {"num_played": 1},
            "the journal has 3 observations for conversations that do not wait for them",
        ),
    ):
        environments.journal.begin_step(0)
        conversations = Conversations(
            environments, conversations.requests, prompts_of(conversations)
        )
        played(conversations, **kwargs)
        with pytest.raises(UserError) as caught:
            conversations.finish()
        assert problem in str(caught.value)
    environments.close()


def test_a_replay_with_shorter_responses_is_one_line(user_file: str) -> None:
    """Check an observation of three tokens where two are left: the engine gets no request without
    room."""
    for limit, replayed in ((10, None), (4, str(Path(user_file).parent))):
        environments, conversations = begun(EnvironmentConfig(user_file), limit, replayed)
        played(conversations)
        if replayed is None:
            conversations.finish()
        else:
            with pytest.raises(
                UserError, match=r"turn 1: data\.max_response_length 4 has no room .*: are model"
            ):
                conversations.finish()
        environments.close()


def test_a_journal_that_cannot_be_written_is_one_warning_a_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    journal = ObservationJournal(tmp_path, None, 0, 0, 0, 0)
    (tmp_path / "observations").write_text("no directory")
    for step in (1, 2):
        journal.begin_step(step)
        for turn in range(2):
            journal.record(TurnAnswer(TurnId(0, 0, turn), 0, Reply(1)))
    assert (
        capfd.readouterr().err.count(
            "observations cannot be written (File exists); the run continues"
        )
        == 2
    )


TURN = TurnId(0, 3, 1)
REPLY = Reply(2, [5, 6], 0.5, {"acc": 1.0}, False, ["raised"], False)


def read_journal(directory: Path, replayed: str | None = None) -> dict[int, Reply]:
    """Return the answers to TURN, by their digests."""
    journal = ObservationJournal(directory, replayed, 0, 0, num_tokens=10, max_tokens=4)
    journal.begin_step(1)
    journal.begin_call()
    return dict(journal.replies(TURN))


def test_a_bit_of_the_journal_that_has_flipped_is_noticed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    journal = ObservationJournal(tmp_path, None, 0, 0, 10, 4)
    journal.begin_step(1)
    for digest in (7, 8):
        journal.record(TurnAnswer(TURN, digest, structs.replace(REPLY, iteration=digest)))
    answers = read_journal(tmp_path)
    assert answers == {digest: structs.replace(REPLY, iteration=digest) for digest in (7, 8)}
    assert "warning" not in capfd.readouterr().err
    (path,) = tmp_path.glob("observations/*")
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert read_journal(tmp_path).items() <= answers.items()
        assert capfd.readouterr().err.count("warning: ") == 1, (bit, bytes(flipped))
    path.write_bytes(content.replace(b'"iteration": 7', b'"iteration": 6'))
    with pytest.raises(UserError, match=r"^trainer\.replay: .*, line 2: its checksum is wrong$"):
        read_journal(tmp_path, str(tmp_path))
    # killed between a row and its newline: the answer is there, and is not asked again
    path.write_bytes(content[:-1])
    assert read_journal(tmp_path) == answers
    assert "warning" not in capfd.readouterr().err
    # the second one ends within the two last braces, and a resumed run has ended the line
    for size in (9, 2):
        path.write_bytes(content[:-size] + b"\n")
        assert read_journal(tmp_path, str(tmp_path)).keys() == {7}
        assert (
            "line 3: is incomplete (of a killed process, or corrupt); it is left out"
            in capfd.readouterr().err
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", 2),
        ("step", True),
        ("environment", "0"),
        ("row", None),
        ("type", "end"),
        ("type", "call_end"),
        ("turn", [0, 3]),
        ("turn", [0, "3", 1]),
        ("turn", [0, 3, 1, 0]),
        ("turn", [0, -1, 1]),
        ("turn", None),
        ("digest", -1),
        ("reply", []),
        ("reply", {}),
        ("iteration", 10**12),
        ("iteration", 10**30),
        ("iteration", 2.0),
        ("token_ids", [10]),
        ("token_ids", [1] * 5),
        ("token_ids", "12"),
        ("token_ids", [[1]]),
        ("reward", "1"),
        ("reward", float("nan")),
        ("reward", 1e300),
        ("info", {"acc": "1"}),
        ("info", []),
        ("ends", "no"),
        ("failed", ["other"]),
        ("failed", [[]]),
        ("failed", "raised"),
        ("is_fatal", True),
        ("other", 1),
    ],
)
def test_a_forged_row_of_the_journal_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    (tmp_path / "observations").mkdir()
    row: dict[str, Any] = to_builtins(TurnAnswer(TURN, 7, REPLY))
    line: dict[str, Any] = {"step": 1, "environment": 0, "row": row}
    changed = next((part for part in (line, row) if name in part), row["reply"])
    changed[name] = value
    (tmp_path / "observations" / "step_000001_0.jsonl").write_text(checked_line(line))
    assert read_journal(tmp_path) == {}
    assert capfd.readouterr().err.count("line 1: is no answer of this step") == 1
    with pytest.raises(UserError, match="line 1: is no answer of this step") as caught:
        read_journal(tmp_path, str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_journal_of_the_first_format_is_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Check an answer, the end of a call, and a line that is neither."""
    (tmp_path / "observations").mkdir()
    common = {"step": 1, "environment": 0}
    reply = {**structs.asdict(REPLY), "at": REPLY.iteration}
    del reply["iteration"]
    end = {**structs.asdict(Reply(9)), "at": 9}
    del end["iteration"]
    rows = [
        {**common, "place": list(TURN), "digest": 7, "reply": reply},
        {**common, "place": [0, -1, 1], "digest": 0, "reply": end},
        {**common, "place": [0, 3], "digest": 7, "reply": reply},
    ]
    (tmp_path / "observations" / "step_000001_0.jsonl").write_text("".join(map(checked_line, rows)))
    journal = ObservationJournal(tmp_path, None, 0, 0, num_tokens=10, max_tokens=4)
    journal.begin_step(1)
    assert journal.begin_call() == 0
    assert journal.replies(TURN) == {7: REPLY} and journal.num_answered(0) == 1
    assert (journal.last_iteration(0), journal.last_iteration(1)) == (9, 0)
    assert "line 3: is no answer of this step" in capfd.readouterr().err


def test_the_end_of_a_call_is_in_the_journal(tmp_path: Path) -> None:
    for engine, iteration in enumerate((4, 3)):
        journal = ObservationJournal(tmp_path, None, engine, 0, num_tokens=10, max_tokens=4)
        journal.begin_step(1)
        journal.record(
            TurnAnswer(TURN, 7, REPLY), CallEnd(0, engine, iteration), CallEnd(1, engine, 9)
        )
    journal.begin_step(1)
    journal.begin_call()
    assert (journal.last_iteration(0), journal.num_answered(0)) == (4, 1)
    assert (journal.last_iteration(1), journal.num_answered(1)) == (9, 0)


def test_an_environment_that_is_begun_again_gets_the_earlier_turns(
    user_file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Check two conversations that wait in their second turn, of which one had another reward for
    the first."""
    environments, conversations = begun(EnvironmentConfig(user_file))
    turns = Generation(
        [3, 2, 3, 2, 9, 3, 2], [-1.0, -1.0, OBSERVED, OBSERVED, OBSERVED, -1.0, -1.0], True
    )
    requests = [Request(i, one.prompt, i, turns) for i, one in enumerate(conversations.requests)]
    retained = {
        i: ConversationState(0, True, False, Episode([(1, reward)], {}, {}, None, 0.0, [(2, 5)]))
        for i, reward in enumerate((1.0, 0.5))
    }
    conversations = Conversations(
        environments, requests, prompts_of(conversations), range(2), retained
    )
    ended = played(conversations)
    assert ended[0].token_ids == ended[1].token_ids == [3, 2, 3, 2, 9] * 2 + [3, 2]
    rewards = [(1, 0.5), (3, 1.0), (5, 1.0)]
    assert conversations.episode(1) == Episode(
        rewards, {"turn": 3.0}, {}, None, 0.0, [(2, 5), (7, 10)]
    )
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "begun again" in line]
    assert "row 1: begun again, it answers turn 1 otherwise than before" in line
    environments.close()


FAULTS: dict[str, tuple[str, str]] = {
    "raises": ("raised", "raised SystemExit: no more"),
    "hangs": ("timeout", "no answer after 0.5 s"),
    "wrong": ("invalid", "observation of bytes"),
    "no token": ("invalid", "step returned the token 1000000000000; the tokenizer has 1114113"),
    "done": ("invalid", "step returned 'no' as done, not a bool"),
}


def test_reset_gives_the_first_observation(
    user_file: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Check one that fits, one that leaves the model a single token, and a reset that fails or
    needs the setting."""
    cfg = EnvironmentConfig(
        user_file, kwargs={"kind": "begins"}, first_observation=True, max_turns=2
    )
    prompt = [{"role": "system", "content": "Play."}]
    environments, conversations = begun(cfg, messages=prompt)
    assert environments.translator.prompt_arguments == {"add_generation_prompt": False}
    assert conversations.start(conversations.requests) == [] and conversations.num_waiting == 2
    ended = played(conversations)
    first = "<user>go\2\n<assistant>"
    assert "".join(map(chr, ended[1].token_ids)) == f"{first}\3\2\3\2\t\3\2"
    assert observations(ended[1]) == [first, "\3\2\t"]
    episode = conversations.episode(1)
    assert episode.rewards == [(-1, 0.0), (1, 1.0), (3, 1.0)] and (
        episode.num_turns,
        episode.score,
    ) == (2, 2.0)
    assert len(ended[0].token_ids) == 60 and ended[0].num_drawn == 1 and not ended[0].finished
    environments.close()
    for kind, first_observation, problem in (
        ("never begins", True, "its reset has failed"),
        ("begins", False, "reset returned list without rollout.environment.first_observation"),
    ):
        shutil.rmtree(tmp_path / "observations")
        cfg = replace(cfg, kwargs={"kind": kind}, first_observation=first_observation)
        environments, conversations = begun(cfg, messages=prompt)
        ended = played(conversations)
        assert ended[1].token_ids == [3, 2] and conversations.episode(1).failure == "invalid"
        assert problem in capfd.readouterr().err
        environments.close()


@pytest.mark.parametrize("kind", [*FAULTS, "blocks", "megabyte"])
def test_a_fault_of_an_environment_ends_its_conversation_alone(
    user_file: str, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Check with a default observation, and without one, where the conversation has the default
    score."""
    is_late = kind not in FAULTS or FAULTS[kind][0] == "timeout"
    cfg = EnvironmentConfig(
        user_file,
        kwargs={"kind": kind},
        timeout_seconds=0.5 if is_late else 10.0,  # a busy machine takes its time
        num_workers=2,
        default_score=-2.0,
    )
    environments, conversations = begun(cfg)
    ended = played(conversations)
    assert len(ended[0].token_ids) == 12  # the other conversation, of another worker
    episode = conversations.episode(1)
    if kind == "megabyte":
        assert len(ended[1].token_ids) == 60 and not ended[1].finished and episode.failure is None
    else:
        wanted, message = FAULTS.get(kind, ("timeout", "is blocked"))
        assert (episode.failure, episode.score, episode.failed_calls) == (wanted, -2.0, {wanted: 1})
        assert not any(reward for _, reward in episode.rewards), (
            "its tokens would be rewarded beside the score"
        )
        # "blocks" does so at once, in a process that starts with the turn.
        assert (
            ended[1].token_ids == ([3, 2] if kind == "blocks" else [3, 2, 3, 2, 9, 3, 2])
            and ended[1].finished
        )
        assert message in capfd.readouterr().err
    if kind in FAULTS:
        cfg.default_observation = "!{error}"
        cfg.max_observation_length = 9
        conversations = Conversations(
            environments, conversations.requests, prompts_of(conversations)
        )
        ended = played(conversations)
        assert ended[1].token_ids[7] == ord("!") and conversations.episode(1).failure is None
        assert conversations.episode(1).failed_calls == {FAULTS[kind][0]: 1}
        assert conversations.episode(1).score == 2.0  # of the first and the last turn
    environments.close()


MASKS = """
from rlhf_mc.rewards.results import MaskSample

class Environment:
    def __init__(self, turn):
        self.turn = turn

    def reset(self, row):
        self.turn -= row["ground_truth"] == 0  # the first conversation is masked a turn earlier
        if self.turn <= 0:
            raise MaskSample("no sandbox")
        return "go"

    def step(self, response):
        self.turn -= 1
        if self.turn == 0:
            raise MaskSample("the sandbox died")
        return "more", 1.0, False, {}
"""


@pytest.mark.parametrize("first_observation", [False, True])
def test_an_environment_masks_its_conversation_which_ends(
    user_file: str, first_observation: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Check with a default observation, which a masked conversation does not get: one masked in its
    reset, or in its first turn, and one in the turn that follows."""
    body = MASKS if first_observation else MASKS.replace('return "go"', "return None")
    Path(user_file).write_text(body)
    cfg = EnvironmentConfig(
        user_file,
        kwargs={"turn": 1 if first_observation else 2},
        first_observation=first_observation,
        default_observation="!{error}",
        default_score=-2.0,
    )
    environments, conversations = begun(cfg)
    ended = played(conversations)
    for number, num_turns in ((0, 1), (1, 1 if first_observation else 2)):
        episode = conversations.episode(number)
        assert episode.is_masked and episode.failed_calls["masked"] == 1
        assert (episode.num_turns, episode.score) == (num_turns, -2.0) and ended[number].finished
    assert "MaskSample: the sandbox died; the conversation scores -2" in capfd.readouterr().err
    rows = "".join(path.read_text() for path in (tmp_path / "observations").iterdir())
    assert '"masked"' in rows.replace(" ", "")
    environments.close()


ENDING = """
import asyncio, ctypes, os, signal

class Environment:
    def reset(self, row):
        self.number = row["ground_truth"]
        self.turns = 0

    async def step(self, response):
        if self.number == 1 and response[0] == "k":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.number == 1 and response[0] == "x":
            os._exit(3)
        if self.number == 1 and response[0] == "s":
            ctypes.string_at(0)
        await asyncio.sleep(0.1)
        self.turns += 1
        return "go", 1.0, response[0] == "z", {"turns": self.turns}
"""


@pytest.mark.slow
def test_a_process_that_a_call_ends_takes_no_other_conversation_with_it(
    user_file: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Check a conversation that draws at this time, and one that waits for the same process."""
    Path(user_file).write_text(ENDING)
    cfg = EnvironmentConfig(user_file, default_score=-2.0)
    environments, conversations = begun(cfg, 1000)
    conversations.start(conversations.requests)
    (request,) = answered(conversations, 0, "a").requests
    assert answered(conversations, 1, "k").ended and conversations.episode(1).score == -2.0
    assert answered(conversations, 0, "z", request.partial).ended
    assert (
        conversations.episode(0).info == {"turns": 2} and conversations.episode(0).failure is None
    )
    cfg.default_observation = "!{error}"
    conversations = Conversations(environments, conversations.requests, prompts_of(conversations))
    ended = played(conversations, ("a", "k", "a", "x", "s", "z"))
    one = conversations.episode(0)
    other = conversations.episode(1)
    assert (one.score, one.info, one.failed_calls) == (6.0, {"turns": 6}, {})
    assert (other.score, other.info, other.failed_calls) == (
        3.0,
        {"turns": 3},
        {"exited": 3},
    ) and not other.failure
    ends = ("by SIGKILL (out of memory?)", "with exit code 3", "by SIGSEGV")
    texts = [f"!its worker process ended, {end}" for end in ends]
    assert observations(ended[1]) == ["go", texts[0], "go", *texts[1:]]
    assert capfd.readouterr().err.count("row 1: its worker process ended") == 4
    assert len(environments.pool._workers) == 1, "of the next conversations"
    environments.close()


def answered(
    conversations: Conversations, number: int, text: str, begun: Generation = NOTHING
) -> Arrivals:
    """Let the model draw a turn of one conversation. Return what arrives for it."""
    tokens = [*begun.token_ids, *map(ord, text), 2]
    log_probs = [*begun.log_probs, *[-1.0] * (len(text) + 1)]
    conversations.submit({number: Generation(tokens, log_probs, True)})
    deadline = time.monotonic() + 30
    while conversations.num_waiting:
        assert time.monotonic() < deadline, "a conversation waits"
        arrivals = conversations.receive(is_idle=True)
    return arrivals


def test_constructors_do_not_block_the_process(tmp_path: Path) -> None:
    """Check with two constructors that wait for each other."""
    path = tmp_path / "slow.py"
    path.write_text(
        "import threading\n"
        "barrier = threading.Barrier(2)\n"
        "numbers = iter(range(3))\n"
        "class Environment:\n"
        "    def __init__(self):\n"
        "        if next(numbers) > 0: barrier.wait(10)  # the first one is built as a check\n"
        "    def reset(self, row): pass\n"
        "    def step(self, response): return '', 1.0, True, {}\n"
    )
    conversations = EnvironmentsOfWorker(EnvironmentConfig(str(path)))

    async def answers() -> list[Any]:
        return await asyncio.gather(
            *(conversations.answer(Turn((0, i), {}, "", [])) for i in range(2))
        )

    assert asyncio.run(answers()) == [StepResult("", 1.0, True, {})] * 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Other: pass", "has no function 'Environment' (rollout.environment.name)"),
        (
            "class Environment:\n    def __init__(self): raise ValueError(3)",
            "building an object raised ValueError: 3",
        ),
        ("class Environment:\n    def reset(self, row): pass", "has no method step"),
        (
            "import os; os._exit(3)",
            "importing it failed: its worker process ended, with exit code 3",
        ),
    ],
)
def test_an_environment_that_cannot_be_used_is_one_line(
    user_file: str, text: str, message: str
) -> None:
    Path(user_file).write_text(text)
    with pytest.raises(UserError) as caught:
        begun(EnvironmentConfig(user_file))
    assert message in str(caught.value)


FUNCTIONS = """
import functools, time
from rlhf_mc.rewards.results import MaskSample

def _traced(function):
    @functools.wraps(function)
    def call(**kwargs):
        return function(**kwargs)
    return call

@_traced
async def add(a: int, b: int = 1) -> dict:
    '''Add numbers.

    Args:
        a: The first.
        b: The second.
    '''
    return {"sum": a + b}

def masks() -> str:
    'Mask.'
    raise MaskSample("no service")


def fault(kind: str):
    '''Have a fault.

    Args:
        kind: Which one.
    '''
    if kind == "raises":
        raise SystemExit("no more")
    if kind == "hangs":
        time.sleep(2)
    if kind == "text":
        return type("Text", (), {"__str__": lambda self: exit(3)})()
    return "m" * 2**20 if kind == "megabyte" else ("four", 1.0, {}, 4)

def _helper(): ...
"""
CLASSES = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.reward_score import default_compute_score, gsm8k, math_dapo
from verl.utils.reward_score.math_reward import compute_score
from verl.utils.rollout_trace import rollout_trace_op

assert gsm8k.compute_score("so #### 1,024", "1024", format_score=0.1) == compute_score(r"\\boxed{.5}", "0.5") == 1.0
assert gsm8k.compute_score("#### 3 or 4", "4", "flexible") == 1.0
assert gsm8k.compute_score("#### 3", "4", format_score=0.1) == 0.1 and gsm8k.compute_score("3", "3") == 0.0
assert math_dapo.compute_score("Answer: 5", "6") == {"score": -1.0, "acc": False, "pred": "5"}
MATH = ("HuggingFaceH4/MATH-500", r"\\boxed{5}")
for source, text in (("openai/gsm8k", "#### 5"), MATH, ("numina_cn_k12", "answer: 5")):
    score = default_compute_score(source, text, "5")
    assert 1.0 == (score["score"] if isinstance(score, dict) else score)
try:
    raise AssertionError(default_compute_score("codecontests", "", ""))
except NotImplementedError:
    pass

class Counter(BaseTool):
    counts = {}

    async def create(self, instance_id=None, step=10, **kwargs):
        self.config["step"] += step - 10
        instance_id, answer = await super().create(instance_id, **kwargs)
        self.counts[instance_id] = kwargs["create_kwargs"]["start"]
        return instance_id, answer

    @rollout_trace_op
    async def execute(self, instance_id, parameters, **kwargs):
        self.counts[instance_id] += self.config["step"]
        assert kwargs["agent_data"].messages == []
        return ToolResponse(text=f"count {self.counts[instance_id]}"), -0.25, {"counted": self.counts[instance_id]}

    async def calc_reward(self, instance_id, **kwargs):
        return self.counts[instance_id] * kwargs["factor"]

    async def release(self, instance_id, **kwargs):
        print("released at", self.counts.pop(instance_id), flush=True)

class Wrong:
    def __init__(self, config, tool_schema):
        self.tool_schema = ["count"]
"""  # noqa: E501
CONFIG = """
tools:
  - class_name: own_classes.Counter
    config: {step: 10, type: native}
    tool_schema:
      type: function
      function:
        name: count
        description: Count.
        parameters: {type: object, properties: {}, required: []}
"""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def tools(user_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentConfig:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in (
        ("functions.py", FUNCTIONS),
        ("own_classes.py", CLASSES),
        ("tools.yaml", CONFIG),
    ):
        (tmp_path / name).write_text(text)
    return EnvironmentConfig(
        function_tool_path=str(tmp_path / "functions.py"),
        tool_config_path=str(tmp_path / "tools.yaml"),
        max_parallel_calls=2,
        timeout_seconds=0.5,
        max_observation_length=100,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: []", "tools.yaml defines no tool"),
        ("tools:", "tools.yaml: expected 'tools', a list of mappings that each have 'class_name'"),
        (
            CONFIG.replace("Counter", "Other"),
            "tools.yaml: AttributeError: module 'own_classes' has no attribute 'Other'",
        ),
        (
            CONFIG.replace("name: count", "title: count"),
            "tools.yaml: ValueError: tool_schema has no function.name",
        ),
        (
            CONFIG.replace("name: count", "name: 3"),
            "Counter: its schema is no tool's: Expected `str`, got `int`",
        ),
        (
            CONFIG.replace("parameters: {", "parameters: []  # {"),
            "Expected `object | null`, got `array`",
        ),
        (
            CONFIG.replace("Counter", "Wrong"),
            "Wrong: its schema is no tool's: 'list' object has no attribute",
        ),
        (
            CONFIG.replace("Count.", '"\\ud800"'),
            "Counter: its schema is no tool's: 'utf-8' codec can't encode",
        ),
    ],
)
def test_a_tool_file_that_cannot_be_used_is_one_line(
    tools: EnvironmentConfig, text: str, message: str
) -> None:
    Path(str(tools.tool_config_path)).write_text(text)
    with pytest.raises(UserError) as caught:
        begun(EnvironmentConfig(tool_config_path=tools.tool_config_path))
    assert message in str(caught.value)


def observations(one: Generation) -> list[str]:
    """Return the texts of a conversation's observations."""
    marked = "".join(
        chr(t) if p == OBSERVED else "|" for t, p in zip(one.token_ids, one.log_probs, strict=True)
    )
    return [text for text in marked.split("|") if text]


@pytest.mark.slow
def test_tools_answer_calls_until_a_turn_has_none(
    tools: EnvironmentConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """Check a function, and a class of verl's with a row's arguments, which has an instance for
    each conversation."""
    kwargs = {
        "count": {"create_kwargs": {"start": 5, "step": None}, "calc_reward_kwargs": {"factor": 2}},
        "add": None,
    }
    environments, conversations = begun(tools, 5000, extra_info={"tools_kwargs": kwargs})
    schemas = environments.translator.prompt_arguments["tools"]
    assert [one["function"]["name"] for one in schemas] == ["add", "masks", "fault", "count"]
    assert schemas[0]["function"]["parameters"]["required"] == ["a"]
    three = call("add", a=1) + call("count") + call("count")  # one more than may run
    ended = played(conversations, [three, call("count"), "16"])
    for number in (0, 1):
        assert observations(ended[number]) == [
            '\n<tool>{"sum": 2}\2\n<tool>count 15\2\n<assistant>',
            "\n<tool>count 25\2\n<assistant>",
        ]
        episode = conversations.episode(number)
        assert [reward for _, reward in episode.rewards] == [-0.25, -0.25, 0.0]
        assert episode.info == {
            "tool_calls": 3,
            "invalid_calls": 0,
            "counted": 25,
            "calc_reward/count": 50,
        }
    single = replace(prompts_of(conversations)[1], agent_name="single_turn_agent")
    conversations = Conversations(environments, conversations.requests, [single, single])
    assert not observations(played(conversations, [three])[0])
    environments.close()
    printed = capfd.readouterr()
    assert printed.out.count("released at 25") == 2 and "does not render tools" not in printed.err


@pytest.mark.slow
def test_faults_of_tools_and_calls_are_observations(tools: EnvironmentConfig) -> None:
    environments, conversations = begun(tools, 20_000)
    wanted = {
        call("fault", kind="raises"): "Error: raised SystemExit: no more",
        call("fault", kind="hangs"): "Error: gave no answer after 0.5 s",
        call("fault", kind="four"): "Error: returned 4 values",
        call("fault", kind="text"): "Error: raised SystemExit: 3",
        call("fault", kind="megabyte"): "m" * 50 + "...(truncated)..." + "m" * 50,
        call(
            "nothing"
        ): "Error: there is no tool 'nothing'; the tools are add, masks, fault, count",
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>': (
            r"Error: there is no tool "
            r"'\ud800'; the tools"
        ),
        call("add", c=1): "Error: add: missing a required argument: 'a'",
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>': (
            "Error: the arguments are not a JSON object"
        ),
        "<tool_call>{": "Error: the tool call cannot be read",
        call("count"): "Error: raised KeyError: 'start'",  # the rows have no arguments for it
    }
    ended = played(conversations, [*wanted, "the end"])
    for found, text in zip(observations(ended[0]), wanted.values(), strict=True):
        assert found.startswith(f"\n<tool>{text}") and len(found) < 200
    episode = conversations.episode(0)
    assert (
        episode.failed_calls == {"raised": 3, "timeout": 1, "invalid": 1}
        and episode.failure is None
    )
    assert episode.info == {"tool_calls": 11, "invalid_calls": 5}
    environments.close()


FORMATS = {
    "hermes": ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "<tool_call>add"),
    "llama3_json": ('{"name": "add", "parameters": {"a": 1}}', "<|python_tag|>add(1)"),
    "glm45": (
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        '<tool_call>{"name": "add"}</tool_call>',
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        '<tool_call>\n{"name": "add"}\n</tool_call>',
    ),
    "deepseek_v31": (
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": '
            "1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add",
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.add"
        ' <|constrain|>json<|message|>{"a": 1}<|call|>',
        "<|channel|>commentary to=functions.add",
    ),
}


def test_a_tool_masks_its_conversation_which_ends(tools: EnvironmentConfig) -> None:
    environments, conversations = begun(tools, 20_000)
    ended = played(conversations, [call("masks"), call("add", a=1)])
    episode = conversations.episode(0)
    assert episode.is_masked and episode.num_turns == 1 and observations(ended[0]) == []
    assert episode.failure is None and ended[0].finished
    environments.close()


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_in_each_format(name: str) -> None:
    """Check a call, one that cannot be read, and an answer."""
    from rlhf_mc.rollout.vllm_tools import ToolCallParser  # vLLM

    tokenizer = Letters()
    tokenizer.get_vocab = lambda: dict.fromkeys(re.findall("<[^<>]+>", str(FORMATS)), 0)  # type: ignore[attr-defined]
    properties = {"a": {"type": "integer"}}
    schema = {"name": "add", "parameters": {"type": "object", "properties": properties}}
    parser = ToolCallParser(name, tokenizer, (2,), [{"type": "function", "function": schema}])  # type: ignore[arg-type]
    call, broken = FORMATS[name]
    content, ((found, arguments, _),) = parser.calls([*map(ord, f"hm {call}"), 2])
    assert (found, json.loads(arguments)) == ("add", {"a": 1})
    assert content.strip() == ("" if name in ("gpt-oss", "llama3_json") else "hm")
    assert parser.calls([*map(ord, broken)])[1] == [("", "", "call00000")]
    for answer in (
        "1",
        "<|channel|>analysis<|message|>to=functions.add<|end|><|start|>assistant<|channel|>final<|message|>1",
    ):
        assert parser.calls([*map(ord, answer)])[1] == []


def _glm(role: str, content: str, is_last: bool) -> str:
    """Render a message whose end token begins the next one."""
    return {"user": "U", "assistant": "A"}[role] + content


def _without_end(role: str, content: str, is_last: bool) -> str:
    return f"<{role}>{content}"


def _gpt_oss(role: str, content: str, is_last: bool) -> str:
    """Render a message. The last response has another end token than those before, which have no
    thoughts."""
    text = content.rpartition(")")[2]
    return f"<{role}>{content}R" if is_last and role == "assistant" else f"<{role}>{text}E"


@pytest.mark.parametrize(
    ("rendered", "turn", "wanted"),
    [
        (_glm, "hU", "hiA"),
        (_glm, "hO", "UhiA"),
        (_glm, "h", "UhiA"),
        (_gpt_oss, "hR", "<user>hiE<assistant>"),
        (_gpt_oss, "h", "E<user>hiE<assistant>"),
        (_without_end, "hO", "<user>hi<assistant>"),
        (_without_end, "h", "<user>hi<assistant>"),
    ],
)
def test_observations_follow_the_end_token_of_the_turn(
    rendered: Callable[..., str], turn: str, wanted: str
) -> None:
    """Check contents with an end token too: it ends no turn, and no text before it is lost."""
    for content in ("hi", "hOi", "O<stop>"):
        assert observed(rendered, turn, content) == wanted.replace("hi", content)


def observed(rendered: Callable[..., str], turn: str, content: str = "hi") -> str:
    """Return what follows a turn where the user answers. Messages are rendered one by one."""
    tokenizer = Letters()

    def render(messages: list[dict[str, str]], add_generation_prompt: bool, **kwargs: Any) -> str:
        texts = [rendered(one["role"], one["content"], one is messages[-1]) for one in messages]
        return "".join(texts) + rendered("assistant", "", False).rstrip("E") * add_generation_prompt

    tokenizer.apply_chat_template = render  # type: ignore[method-assign, assignment]
    stops = [*map(ord, "UOR"), STOP]
    observations = ObservationTokenizer(tokenizer, stops, {"tools": ["one"]}, EnvironmentConfig())  # type: ignore[arg-type]
    messages = [{"role": "user", "content": content}]
    tokens = observations.tokens(messages, [*map(ord, turn)])
    assert STOP not in tokens
    # an empty observation has no messages
    observations.check([{"role": "user", "content": "?"}], turn, [], [])
    observations.check([{"role": "user", "content": "?"}], turn.rstrip("R"), messages, tokens)
    return tokenizer.decode(tokens)


def test_templates_that_leave_out_tools_or_thoughts_are_a_warning(
    capfd: pytest.CaptureFixture[str],
) -> None:
    observed(_gpt_oss, "hR")
    (line,) = capfd.readouterr().err.splitlines()
    assert "the chat template does not render tools" in line
    observed(_gpt_oss, "(hm)hR")
    assert (
        "renders the response '(hm)h' otherwise, or without its thoughts" in capfd.readouterr().err
    )


def test_truncated_leaves_out_the_part_that_is_asked_for() -> None:
    cfg = EnvironmentConfig(max_observation_length=4)
    texts = {}
    for side in ("left", "right", "middle"):
        cfg.truncate = side  # type: ignore[assignment]
        texts[side] = truncated("abcdefg", cfg)
    cut = "...(truncated)..."
    assert texts == {"left": f"{cut}defg", "right": f"abcd{cut}", "middle": f"ab{cut}fg"}
    assert truncated("a\ud800", cfg) == "a?"  # no tokenizer takes it
