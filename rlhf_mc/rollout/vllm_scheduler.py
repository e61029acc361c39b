"""The scheduler of the rollout engine: vLLM's, without the calls that change nothing while a
request decodes. Schedules, states and tokens equal vLLM's in every step. vLLM's own code begins,
preempts, resumes and ends requests, and allocates, caches and frees their blocks.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.utils import remove_all
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rlhf_mc.rollout.draws import LogProbs, request_number


class DecodeScheduler(AsyncScheduler):
    """vLLM's scheduler for text requests without LoRA, priorities, speculation, structured output
    and connectors."""

    # Attributes of vLLM's.
    running: list[Request]
    finished_req_ids: set[str]
    reset_preempted_req_ids: set[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.connector is None and self.ec_connector is None and self.lora_config is None
        assert self.num_spec_tokens == 0 and not self.use_pp and not self.log_stats
        self._log_probs: LogProbs | None = None
        self._experts: defaultdict[str, list[np.ndarray]] = defaultdict(list)
        """Experts that vLLM has returned for unfinished requests, by request id."""
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self._has_one_cache = len(managers) == 1 and type(managers[0]) is FullAttentionManager
        """True with one block table, which vLLM's KV cache manager changes only where a request
        needs a new block. False with sliding windows and linear attention."""
        self._block_size = managers[0].block_size if managers else 0

    @contextlib.contextmanager
    def recording(self, log_probs: LogProbs) -> Iterator[None]:
        """Append the log-probs of each step to `log_probs` while the body runs. A step then outputs
        only the ended requests, each with the experts of all its tokens."""
        self._log_probs = log_probs
        try:
            yield
        finally:
            self._log_probs = None

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Return the next step. Where all requests decode, the KV cache manager is called only for
        the requests that need a new block."""
        requests = self._decoding()
        if not requests:
            return super().schedule(throttle_prefills)
        self.current_step += 1
        names = [request.request_id for request in requests]
        blocks: list[tuple[list[int], ...] | None] = [None] * len(names)
        for row, request in enumerate(requests):
            if request.num_computed_tokens % self._block_size == 0:
                new_blocks = self.kv_cache_manager.allocate_slots(request, 1)
                assert new_blocks is not None, "_decoding has counted the free blocks"
                blocks[row] = new_blocks.get_block_ids(allow_none=True)
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=names,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=blocks,
                num_computed_tokens=[request.num_computed_tokens for request in requests],
                num_output_tokens=[
                    len(request._output_token_ids) + request.num_output_placeholders
                    for request in requests
                ],
            ),
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
        )
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids = set(names)
        if self.aux_output_connector is not None:
            output.aux_output_connector_metadata = self.aux_output_connector.build_connector_meta(
                output, self.requests
            )
        for request in requests:
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += 1
        self.finished_req_ids = set()
        self.reset_preempted_req_ids = set()
        return output

    def _decoding(self) -> list[Request]:
        """Return the requests of the next step if all decode and none is preempted, else none."""
        running = self.running
        if (
            not self._has_one_cache
            or self.waiting
            or self.kv_holding_waiting
            or self._pause_state != PauseState.UNPAUSED
            or len(running)
            > min(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens)
        ):
            return []
        requests = []
        num_new_blocks = 0
        block_size = self._block_size
        last_place = self.max_model_len - 1
        for request in running:
            num_computed = request.num_computed_tokens
            num_pending = request.num_output_placeholders
            if len(request._all_token_ids) + num_pending - num_computed != 1:
                return []  # it prefills
            if num_computed >= last_place or (
                num_pending
                and num_computed + 2 - num_pending >= request.num_prompt_tokens + request.max_tokens
            ):
                continue  # its last token is being sampled
            num_new_blocks += num_computed % block_size == 0
            requests.append(request)
        if num_new_blocks > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return []  # some are preempted
        if not self.use_v2_model_runner and any(
            r.request_id not in self.prev_step_scheduled_req_ids for r in requests
        ):
            return []  # the runner gets all tokens of such a request
        return requests

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Append the tokens of a step to their requests. Return vLLM's outputs of all requests, or
        while `recording` of ended ones."""
        if self._log_probs is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        rows: list[int] = []
        numbers: list[int] = []
        ended: list[EngineCoreOutput] = []
        stopped: list[tuple[Request, bool]] = []
        rows_by_name = model_runner_output.req_id_to_index
        sampled = model_runner_output.sampled_token_ids
        for name, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(name)
            if request is None:
                continue  # ended while the step was in flight
            request.num_in_flight_tokens -= num_scheduled
            is_stale = request.num_stale_output_tokens > 0
            if is_stale:  # preempted while the step was in flight
                request.num_stale_output_tokens -= num_scheduled
            row = rows_by_name[name]
            tokens = sampled[row]
            if not tokens or (is_stale and request.drop_stale_output):
                continue  # no token: the step computed a part of the prompt
            rows.append(row)
            numbers.append(request_number(name))
            was_running = request.status == RequestStatus.RUNNING
            has_ended = False
            if is_stale or not self._append(request, tokens[0]):
                _, has_ended = self._update_request_with_output(request, tokens, is_stale)
            if self.aux_output_connector is not None:
                self._take_experts(request, model_runner_output)
            if has_ended:
                ended.append(self._end(request, tokens))
                stopped.append((request, was_running))
        if rows:
            log_probs = model_runner_output.logprobs
            assert log_probs is not None and log_probs.cu_num_generated_tokens is None
            self._log_probs.append(numbers, log_probs.logprobs[rows, 0])
        if not ended:
            return {}
        self.running = remove_all(
            self.running, {request for request, was_running in stopped if was_running}
        )
        if preempted := {request for request, was_running in stopped if not was_running}:
            self.waiting.remove_requests(preempted)
            self.kv_holding_waiting.remove_requests(preempted)
            self.deferred_waiting.difference_update(preempted)
        return {0: EngineCoreOutputs(outputs=ended)}

    def _append(self, request: Request, token: int) -> bool:
        """Append the token and return True, or return False if vLLM's code has to: the token may
        end the response, or a block is full."""
        known = request._all_token_ids
        num_known = len(known) + 1
        params = request.sampling_params
        assert params is not None
        if (
            not self._has_one_cache
            or num_known % self._block_size <= 1  # the token, or the one before it, fills a block
            or token in params.stop_token_ids
            or num_known >= self.max_model_len
            or num_known >= request.num_prompt_tokens + request.max_tokens
        ):
            return False
        known.append(token)
        request._output_token_ids.append(token)
        request.num_output_placeholders -= 1
        return True

    def _take_experts(self, request: Request, output: ModelRunnerOutput) -> None:
        assert self.aux_output_connector is not None
        rows = self.aux_output_connector.take_output(request, output.aux_output_connector_output)
        if rows is not None:
            # A copy: the rows are a view of the page-locked array of the whole step.
            self._experts[request.request_id].append(rows.copy())

    def _end(self, request: Request, tokens: list[int]) -> EngineCoreOutput:
        """Free a request that has ended. Return its output."""
        experts = self._experts.get(request.request_id)
        self._free_request(request)
        return EngineCoreOutput(
            request.request_id,
            tokens,
            finish_reason=request.get_finished_reason(),
            routed_experts=None if experts is None else np.concatenate(experts),
        )

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._experts.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks)
