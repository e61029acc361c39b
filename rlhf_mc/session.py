"""The life of a run in this process: join the other ranks, build models and engine, hand over the
run, close. __main__.py and api.py train inside it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rlhf_mc.config.schema import Config, layouts
from rlhf_mc.runtime.cuda_environment import forbid_tf32, set_cuda_connections
from rlhf_mc.runtime.preemption import StopRequests
from rlhf_mc.runtime.rank_status import RankStatus
from rlhf_mc.runtime.work import importing

if TYPE_CHECKING:  # torch is imported once the environment is set
    from rlhf_mc.trainer.run import Run


@contextlib.contextmanager
def session(
    cfg: Config,
    status: RankStatus,
    stop: StopRequests,
    before_close: Callable[[], object] = lambda: None,
) -> Iterator[Run]:
    """Yield the run of a checked config (early_checks.py), with heartbeats, and with phases on rank
    0's console. Every rank must enter and leave it.

    before_close: called once all ranks have left, before engine and process groups are closed.
    After an exception nothing is closed: other ranks may be in a collective."""
    rank = int(os.environ.get("RANK", "0"))
    # Rank 0 alone logs warnings, which are the same on all ranks. The user need not see libraries'
    # warnings.
    logging.basicConfig(
        level=logging.WARNING if rank == 0 else logging.ERROR, format="rlhf_mc: %(message)s"
    )
    warnings.filterwarnings("ignore")
    # about missing Triton, on every rank
    logging.getLogger("torch._library").setLevel(logging.ERROR)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported, below
    set_cuda_connections(
        max(megatron.tensor_model_parallel_size for megatron in layouts(cfg).values())
    )
    forbid_tf32([megatron.dtype for megatron in layouts(cfg).values()])
    # tqdm takes a tenth of a second
    from rlhf_mc.observability.phase_progress import phase_progress

    with phase_progress(status, wanted=rank == 0 and "console" in cfg.trainer.logger):
        with importing("importing torch"):
            from rlhf_mc import platform
            from rlhf_mc.observability.metrics import PhaseTimer
            from rlhf_mc.runtime.determinism import use_deterministic_algorithms
            from rlhf_mc.runtime.heartbeat import heartbeats
            from rlhf_mc.topology.rendezvous import init_process_group

        trainer = cfg.trainer
        platform.keep_freed_memory()
        if trainer.deterministic:
            use_deterministic_algorithms()
        # used for the names of the phases, which an error carries as notes
        timer = PhaseTimer(status=status)
        with timer.phase("join"):
            init_process_group(trainer.dist_timeout_seconds)
        stop.read_job_end()
        # A straggler is named after half the timeout of a collective, before the other ranks fail.
        with heartbeats(
            status, rank, trainer.heartbeat_timeout_seconds, trainer.dist_timeout_seconds / 2
        ):
            with timer.phase("import"), importing("Megatron-Core"):
                from rlhf_mc.models.transformer_engine import import_transformer_engine

                import_transformer_engine()
                from rlhf_mc.setup.build import build_run
                from rlhf_mc.topology.groups import barrier, shut_down
            with timer.phase("setup"):
                run = build_run(cfg)
            with timer.phase("fit"):
                yield run
                barrier()
        before_close()
        status.enter("close")
        if run.environments is not None:
            run.environments.close()
        # before its process groups are destroyed: garbage collection would print a stack trace
        run.rollout.close()
        # No heartbeats from here on: the ranks end at different times.
        shut_down()
