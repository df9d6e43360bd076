"""The objects around an orchestrator's loop: pools of environments, servers' clients, the bus, files and logs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loguru import logger

from prime_hpc.client.inference import POLICY, InferenceClient
from prime_hpc.observe.metric_names import evaluated
from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.orchestrator.algorithms.teacher import Teacher
from prime_hpc.orchestrator.evaluation import rewards_text
from prime_hpc.orchestrator.metrics import SampleLog
from prime_hpc.orchestrator.trace_log import TraceLog
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.messaging.file_transfer import HandoverServer
from prime_hpc.store.run_paths import RunPaths


@dataclass(frozen=True)
class Parts:
    """The objects that `main` builds around the loop. `eval_pool` is None where evaluation is off."""

    paths: RunPaths
    train_pool: Any
    eval_pool: Any
    urls: Sequence[str]
    clients: Sequence[InferenceClient]
    bus: BusClient
    handover: HandoverServer
    status: RoleStatus
    metrics: MetricsWriter
    samples: SampleLog
    incarnation: int
    ready_timeout_s: float
    served_as: str = POLICY
    """Name of the policy on the servers; of several runs on the same servers, the run's id."""
    traces: TraceLog | None = None
    teacher: Teacher | None = None
    """The scorer of the policy's tokens, where the algorithm asks for it."""

    def report_evaluation(self, version: int, row: dict[str, Any], samples: list[dict[str, Any]]) -> None:
        """Tell files, status and log of an evaluation that has ended."""
        self.metrics.log(version, **row)
        self.samples.write(version, samples)
        rewards = {name: reward for key, reward in row.items() if (name := evaluated(key))}
        self.status.beat(eval_version=version, eval_reward=rewards)
        logger.info(f"evaluation of version {version}: {rewards_text(row)} ({row['eval/seconds']:.1f} s)")
