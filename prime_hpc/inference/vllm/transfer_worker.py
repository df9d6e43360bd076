"""Weight updates inside a vLLM worker that come over the network; vLLM mixes `ReceivingWorker` in where they do.

As `worker` has it two calls: `policy_join` while requests go on, `policy_receive` while generation is paused. Whole
versions that lie in files go on by `PolicyWorker`'s own.
"""

import time
from typing import TYPE_CHECKING, Any

from prime_hpc.inference.vllm.transfer_engine import TransferEngine, register
from prime_hpc.inference.vllm.worker import PolicyWorker, Prepacked, prepack_again, prepacked_copies

register()  # before vLLM makes the engine of its config


class ReceivingWorker(PolicyWorker):
    """Mixed into vLLM's Worker; `self` is that worker."""

    _policy_prepacked: Prepacked | None = None
    _policy_is_receiving = False

    if TYPE_CHECKING:
        weight_transfer_engine: TransferEngine
        _weight_update_active: bool

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            """vLLM's own, as those below."""

        def start_weight_update(self) -> None:
            """Before the first part."""

        def update_weights(self, update_info: dict[str, Any]) -> None:
            """One part."""

        def finish_weight_update(self) -> None:
            """After the last."""

    def policy_join(self, groups: dict[str, Any]) -> dict[str, Any]:
        """Join the trainer's ranks (`transfer_engine.JoinInfo`); requests go on.
        Returns `{"rank"}`, or `{"rank", "error"}`."""
        try:
            self.init_weight_transfer_engine(groups)
        except Exception as error:  # noqa: BLE001 - torch's own types pickle badly across processes
            return {"rank": self.policy_rank(), "error": f"{type(error).__name__}: {error}"}
        return {"rank": self.policy_rank()}

    def policy_receive(self, part: dict[str, Any], is_first: bool, is_last: bool) -> dict[str, Any]:
        """Receive one part of a version from its rank into the model. Generation must be paused.

        Args:
            part: `transfer_engine.PartInfo`.
            is_first, is_last: of the version's.

        Returns:
            `{"rank", "seconds"}`; or `{"rank", "error"}`: the transfer broke off, and this engine's weights are
            undefined until `policy_abandon`, and others are loaded.
        """
        start = time.perf_counter()
        try:
            if is_first:
                self._policy_is_receiving = True
                self._policy_prepacked = prepacked_copies(self.model_runner.get_model())
                self.start_weight_update()
            self.update_weights(part)
            if is_last:
                self.finish_weight_update()
                self._policy_is_receiving = False
                prepack_again(self.model_runner.get_model(), self._policy_prepacked or {})
        except Exception as error:  # noqa: BLE001 - as above
            return {"rank": self.policy_rank(), "error": f"{type(error).__name__}: {error}"}
        return {"rank": self.policy_rank(), "seconds": round(time.perf_counter() - start, 4)}

    def policy_abandon(self) -> dict[str, Any]:
        """End an update of which not all came, so that other weights can be loaded: vLLM would count those of half a
        layer twice, and take the layer for complete too early. Returns `{"rank"}`."""
        if self._policy_is_receiving:
            from vllm.config import set_current_vllm_config

            with set_current_vllm_config(self.vllm_config):
                self.weight_transfer_engine.abandon_weight_update()
            self._policy_is_receiving = self._weight_update_active = False
        return {"rank": self.policy_rank()}
