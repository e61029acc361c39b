"""Responses of several turns: the conversations of one call of the engines. A turn that has ended
is sent to the environment. The observation's tokens are appended, and the engine continues the
response as with rollout.partial_rollout: tokens depend on seed and position, not on the time of an
observation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from rlhf_mc.config.errors import UserError
from rlhf_mc.data.batch import Generation, Prompt
from rlhf_mc.environments.conversation import Conversation, ConversationState, Status
from rlhf_mc.environments.environment_manager import EnvironmentManager
from rlhf_mc.environments.journal import CallEnd, Reply, TurnAnswer, TurnId
from rlhf_mc.rewards.results import Episode
from rlhf_mc.rollout.base import Arrivals, Request, Sampling
from rlhf_mc.topology.consensus import gather_objects

_IDLE_SECONDS = 0.01
"""Longest wait of an idle engine for an answer, before it looks after other ranks."""


class Conversations:
    """The conversations of one call of the engines: rollout/base.py has the interface, Turns."""

    def __init__(
        self,
        environments: EnvironmentManager,
        requests: Sequence[Request],
        prompts: Sequence[Prompt],
        response_ids: Sequence[int] | None = None,
        retained: Mapping[int, ConversationState] | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        """Begin a call. prompts: of each request. response_ids: numbers of the responses in the
        run; None: they have none. retained: if later calls may continue the conversations, the
        states that earlier calls have left, by the request's number; None: the conversations end
        with the call. sampling: of the call, which agents are told. Every rank must call it."""
        self._environments = environments
        self._journal = environments.journal
        self._sampling = sampling
        self._is_retained = retained is not None
        self._earlier = {} if retained is None else retained
        self.affinity: Mapping[int, int] = {i: state.engine for i, state in self._earlier.items()}
        self._call = self._journal.begin_call()
        names = range(len(requests)) if response_ids is None else response_ids
        keys = environments.begin_call(names, self._is_retained)
        translator = environments.translator
        new = Episode([], {}, {}, None, translator.cfg.default_score)
        self._all = [
            Conversation(
                translator.cfg,
                translator.max_response_length,
                key,
                prompt,
                request,
                self._earlier[i].episode if i in self._earlier else new,
                request.partial,
            )
            for i, (key, prompt, request) in enumerate(zip(keys, prompts, requests, strict=True))
        ]
        self.requests = [conversation.request for conversation in self._all]
        """First turn of each conversation."""
        self._waiting: dict[int, Conversation] = {}
        """Conversations in state WAITING, by the request's number."""
        self._recorded: dict[int, Reply] = {}
        """The journal's answers to these."""
        self._iteration = 0
        """Calls of `receive`: the journal's clock, which does not depend on seconds."""
        self._last_recorded = self._journal.last_iteration(self._call)
        self._num_unused = self._journal.num_answered(self._call) if self._journal.rank == 0 else 0
        """Recorded answers, less those that this rank's conversations have received."""
        self._problem: str | None = None

    @property
    def num_waiting(self) -> int:
        """Number of conversations that wait for their environment."""
        return len(self._waiting)

    @property
    def unanswered(self) -> dict[int, Generation]:
        """Responses whose last turn is not answered, on the ranks of their engine, by the request's
        number."""
        return self._responses(Status.WAITING, Status.UNANSWERED)

    def episode(self, number: int) -> Episode:
        """Return what the environment has given a conversation. number: of its request."""
        return self._all[number].episode

    def start(self, requests: Sequence[Request]) -> list[Request]:
        """Begin conversations, or continue those of earlier calls. Return those with a turn to
        sample."""
        sampling = []
        for request in requests:
            earlier = self._earlier.get(request.number)
            conversation = self._all[request.number]
            conversation.start(waits=earlier is not None and earlier.waits)
            if conversation.status is Status.SAMPLING:
                sampling.append(request)
            else:
                self._await_answer(request.number)
        return sampling

    def submit(self, stopped: Mapping[int, Generation]) -> None:
        """Take responses that the engine has stopped, and let complete turns wait for their
        answers."""
        for number, response in stopped.items():
            self._all[number].stop(response)
            if self._all[number].status is Status.WAITING:
                self._await_answer(number)

    def receive(self, is_idle: bool) -> Arrivals:
        """Return the conversations that are answered. is_idle: the engine has nothing else to
        do."""
        self._iteration += 1
        now = self._iteration
        replies = {i: reply for i, reply in self._recorded.items() if reply.iteration <= now}
        unrecorded = self._waiting.keys() - self._recorded.keys()
        # Up to its last row of the call the journal has all answers: a turn without one is not sent
        # before, since the first run had no answer to it either.
        if now > self._last_recorded and unrecorded:
            new = self._new_replies(unrecorded, _IDLE_SECONDS if is_idle else 0.0)
            replies |= self._environments.on_all_ranks(new)
        requests = []
        ended = {}
        num_cached = 0
        for number, reply in sorted(replies.items()):
            conversation = self._waiting.pop(number)
            self._recorded.pop(number, None)
            conversation.answer(reply)
            if conversation.status is Status.ENDED:
                ended[number] = conversation.response
                self._environments.end(conversation.key)
            elif conversation.status is Status.SAMPLING:
                requests.append(conversation.request)
                num_cached += conversation.num_cached
        return Arrivals(requests, num_cached, ended)

    def abort(self) -> dict[int, Generation]:
        """Close the environments unless conversations are retained. Return the responses that are
        not in the engine and have not ended."""
        for conversation in () if self._is_retained else self._all:
            self._environments.end(conversation.key)
        return self._responses(Status.SUSPENDED, Status.WAITING, Status.UNANSWERED)

    def finish(self) -> None:
        """Record the end of the call. Raise UserError, on all ranks, if the conversations are not
        those of the replayed run. Every rank must call it."""
        if not self._journal.is_replay:
            if self._environments.has_engine:
                end = CallEnd(self._call, self._environments.engine, self._iteration)
                self._journal.record(end)
            return
        problems, nums_unused = zip(*gather_objects((self._problem, self._num_unused)), strict=True)
        problem = next(filter(None, problems), None)
        if problem is None and (num := sum(nums_unused)) > 0:
            observations = f"{num} observations for conversations that do not wait for them"
            problem = f"the journal has {observations}"
        if problem is not None:
            cause = "are model, data, settings and versions those of that run?"
            raise UserError(f"trainer.replay: {problem}: {cause}")

    def states(self) -> dict[int, ConversationState]:
        """Return the state of each conversation that has begun, by the request's number. Every rank
        must call it after the call."""
        engine = self._environments.engine
        on_this_engine = (
            pair for pair in enumerate(self._all) if pair[1].status is not Status.ELSEWHERE
        )
        parts = gather_objects(
            {i: conversation.state(engine) for i, conversation in on_this_engine}
        )
        return {number: state for part in parts for number, state in part.items()}

    def _responses(self, *states: Status) -> dict[int, Generation]:
        return {
            i: conversation.response
            for i, conversation in enumerate(self._all)
            if conversation.status in states
        }

    def _turn_id(self, conversation: Conversation) -> TurnId:
        return TurnId(self._call, conversation.key[1], len(conversation.episode.rewards))

    def _await_answer(self, number: int) -> None:
        """Let a conversation wait for its answer, which the journal may have."""
        conversation = self._all[number]
        turn = self._turn_id(conversation)
        replies = self._journal.replies(turn)
        recorded = replies.get(conversation.digest)
        if recorded is not None and (
            len(recorded.token_ids) + recorded.is_context <= conversation.room
        ):
            self._recorded[number] = recorded
            self._num_unused -= self._environments.is_here(conversation.key)
        elif self._journal.is_replay and replies:
            reason = "the runs have drawn other tokens"
            if recorded is not None:
                limit = f"data.max_response_length {conversation.max_response_length}"
                reason = f"{limit} has no room for the observation"
            where = f"{conversation.prompt.where}, turn {turn.turn + 1}"
            self._problem = f"step {self._journal.step}, {where}: {reason}"
            self._recorded[number] = Reply(0)
        elif self._journal.is_replay and conversation.whole_request.max_tokens is not None:
            conversation.postpone_answer()
            return
        self._waiting[number] = conversation

    def _new_replies(self, numbers: Set[int], seconds: float) -> dict[int, Reply]:
        """Return and record the answers of this rank's environments to these conversations. Without
        any, wait for at most `seconds`."""
        environments = self._environments
        numbers_by_key = {self._all[number].key: number for number in numbers}
        keys = [key for key in numbers_by_key if environments.is_here(key)]
        for key in keys:
            self._send(self._all[numbers_by_key[key]])
        replies = {}
        rows = []
        for key, (index, answer) in environments.receive(keys, seconds).items():
            conversation = self._all[numbers_by_key[key]]
            turn = self._turn_id(conversation)
            if index < turn.turn:
                environments.translator.compare(conversation, index, answer)
                self._send(conversation)
                continue
            reply = environments.translator.reply(conversation, answer, self._iteration)
            replies[numbers_by_key[key]] = reply
            rows.append(TurnAnswer(turn, conversation.digest, reply))
        self._journal.record(*rows)
        return replies

    def _send(self, conversation: Conversation) -> None:
        """Send the next turn, unless the answer to another one is awaited."""
        if (next_turn := self._environments.next_turn(conversation.key)) is not None:
            turn = self._environments.translator.turn(conversation, *next_turn, self._sampling)
            self._environments.send(turn, next_turn[0])
