"""Gradients between the micro-batches of a step: in shards, or whole where `trainer.no_sync` says so."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402

from prime_hpc.config.sections.common import ModelConfig  # noqa: E402
from prime_hpc.config.sections.trainer import LossConfig, TrainerConfig  # noqa: E402
from prime_hpc.trainer.batching.micro_batches import redistribute  # noqa: E402
from prime_hpc.trainer.model.load_policy import load_policy  # noqa: E402
from prime_hpc.trainer.model.policy import Policy  # noqa: E402
from prime_hpc.trainer.objectives import rl_loss  # noqa: E402
from prime_hpc.trainer.optim import build_optimizer  # noqa: E402
from prime_hpc.trainer.parallel import build_parallel  # noqa: E402
from prime_hpc.trainer.parallel.gradients import whole_gradient_bytes  # noqa: E402
from prime_hpc.trainer.train_step import TrainStep  # noqa: E402
from tests.support.ranks import spawn  # noqa: E402
from tests.support.tiny_model import make_tiny_model, random_rank_batch  # noqa: E402

CPU = torch.device("cpu")
CASES: dict[str, dict[str, Any]] = {
    "shards": {},
    "no_sync": {"no_sync": True},
    "replicas": {"parallel": {"dp_replicate": 2}},
    "replicas, no_sync": {"parallel": {"dp_replicate": 2}, "no_sync": True},
}


def held(policy: Policy) -> dict[str, int]:
    """Bytes of gradients by where they are: `whole`, `shards`, `partial` (summed over one copy's ranks only)."""
    found = {"whole": 0, "shards": 0, "partial": 0}
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                found["partial"] += 0 if group._partial_reduce_output is None else group._partial_reduce_output.nbytes
                for p in group.fsdp_params:
                    # torch 2.15: one and the same
                    whole = {id(grad): grad for grad in (p.unsharded_accumulated_grad, p.unsharded_param.grad)}.values()
                    shard: Any = p.sharded_param.grad
                    found["whole"] += sum(grad.nbytes for grad in whole if grad is not None)
                    found["shards"] += 0 if shard is None else shard.to_local().nbytes
    return found


def train(source: Path, world_size: int, section: dict[str, Any]) -> dict[str, Any]:
    """Two steps of three micro-batches a rank: weights, and what is held as each micro-batch's loss is computed."""
    # an update by signs does not amplify a gradient near zero
    own = {"num_ranks": world_size, "no_sync": False, "optim": {"type": "signsgd", "lr": 1e-3, "momentum": 0.9}}
    config = TrainerConfig.model_validate(own | section)
    policy = load_policy(
        ModelConfig(name=str(source), dtype="float32"),
        source,
        build_parallel(config.parallel_dims, CPU),
        CPU,
        reshard_after_forward=True,
        chunk_tokens=512,
    )
    train_step = TrainStep(
        policy, build_optimizer(policy, config.optim), config,
        max_steps=9, normalize="token", device=CPU, peak_flops=1.0,
    )  # fmt: skip
    seen: list[dict[str, int]] = []

    def objective(*args: Any) -> Any:
        seen.append(held(policy))
        return partial(rl_loss, LossConfig())(*args)

    norms = []
    for step in (1, 2):
        whole = random_rank_batch([[20, 9], [15], [8, 8], [17], [5], [12]][: 3 * 2], seed=step, step=step)
        part = redistribute([whole], policy.parallel.data_rank, world_size)
        norms.append(train_step.run(step, part, objective)["grad_norm"])
    weights = {name: tensor.full_tensor().detach() for name, tensor in policy.hf.named_parameters()}
    return {"weights": weights, "seen": seen, "norms": norms, "bytes": whole_gradient_bytes(policy)}


def run_rank(rank: int, folder: str, out: str) -> None:
    """One rank of two: all cases; rank 0 writes what it found."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{out}/store", 2), rank=rank, world_size=2)
    found = {name: train(Path(folder), 2, section) for name, section in CASES.items()}
    if rank == 0:
        torch.save({name: result["weights"] for name, result in found.items()}, f"{out}/weights.pt")
        facts = {name: {k: r[k] for k in ("seen", "norms", "bytes")} for name, r in found.items()}
        Path(f"{out}/facts.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Case -> facts and case -> weights, of two ranks and (`alone`) of one."""
    folder, out = make_tiny_model(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("out")
    spawn(run_rank, (str(folder), str(out)), 2)
    facts, weights = json.loads((out / "facts.json").read_text()), torch.load(out / "weights.pt")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name, case in (("alone", "shards"), ("alone, no_sync", "no_sync")):
        facts[name] = train(folder, 1, CASES[case])
        weights[name] = facts[name].pop("weights")
    dist.destroy_process_group()
    return facts, weights


def test_no_whole_gradient_is_held_between_micro_batches(results):
    facts, _ = results
    for name in ("shards", "alone"):
        seen, ranks = facts[name]["seen"], 2 if name == "shards" else 1
        assert [s["whole"] for s in seen] == [0] * len(seen)
        assert seen[1]["shards"] >= facts[name]["bytes"] / ranks and seen[0]["shards"] == 0
    assert [s["whole"] + s["shards"] for s in facts["replicas"]["seen"]] == [0] * 6
    assert facts["replicas"]["seen"][1]["partial"] >= facts["replicas"]["bytes"]  # shards of one rank, not yet added up


def test_with_no_sync_the_whole_gradient_is(results):
    facts, _ = results
    for name in ("no_sync", "replicas, no_sync", "alone, no_sync"):
        seen = facts[name]["seen"]
        assert seen[1]["whole"] == facts[name]["bytes"] > 0 and seen[1]["shards"] == seen[1]["partial"] == 0


def test_both_ways_give_the_same_update(results):
    facts, weights = results
    for name, found in weights.items():
        assert facts[name]["norms"] == pytest.approx(facts["alone"]["norms"], rel=1e-5), name
        assert all(torch.allclose(found[k], w, atol=1e-6) for k, w in weights["alone"].items()) or "alone" not in name
    assert all(torch.equal(weights["alone"][k], w) for k, w in weights["alone, no_sync"].items())


def test_small_gradients_stay_whole_by_default():
    gib = 1 << 30
    assert TrainerConfig().defers_sync(gib) and not TrainerConfig().defers_sync(gib + 1)
    assert TrainerConfig(no_sync=True).defers_sync(100 * gib) and not TrainerConfig(no_sync=False).defers_sync(0)


def test_the_plan_counts_whole_gradients_where_they_are_kept():
    from prime_hpc.config import Experiment
    from prime_hpc.launch.estimate.model_facts import GIB, model_facts
    from prime_hpc.launch.estimate.trainer_memory import trainer_gib, whole_gradient_bytes

    sizes = {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8}
    facts = model_facts({**sizes, "head_dim": 128, "intermediate_size": 25_600, "vocab_size": 151_936})
    assert facts is not None and facts.num_params is not None

    def of(**trainer: Any) -> tuple[dict[str, float], float]:
        tree = {"model": {"ac": {}}, "trainer": {"num_ranks": 32, **trainer}, "seq_len": 16_384}
        experiment = Experiment.model_validate(tree)
        parts, whole = trainer_gib(experiment, facts), whole_gradient_bytes(experiment, facts)
        assert parts is not None and whole is not None
        return parts, whole / GIB

    (shards, whole), (deferred, _), (split, quarter) = of(), of(no_sync=True), of(parallel={"tp": 4})
    assert whole == pytest.approx(4 * facts.num_params / GIB) and quarter == pytest.approx(whole / 4)
    assert deferred["gradients"] > whole > 100 and shards["gradients"] < 10
    assert split["gradients"] == pytest.approx(shards["gradients"] / 4)
    assert {k: v for k, v in deferred.items() if k != "gradients"} == {
        k: v for k, v in shards.items() if k != "gradients"
    }
