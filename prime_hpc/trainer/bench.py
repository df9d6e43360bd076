"""The end of a trainer's `--bench`, RL or SFT: its figures, as a table and as `<run>/bench/trainer.json`."""

import torch
import torch.distributed as dist
from loguru import logger

from prime_hpc.observe.bench import build_report, mean_of, peak_rss_gib, phases_of, results, table, write_report
from prime_hpc.trainer.model.load_policy import compute_dtype
from prime_hpc.trainer.perf import measured_peak_flops
from prime_hpc.trainer.trainer import Trainer

_TRAINING = ("time/forward_backward", "time/optim")


def finish_bench(trainer: Trainer) -> None:
    """Write and print the results. Collective.

    `tokens/s` and `mfu` are of forward, backward and optimizer, over all ranks; `mfu of measured` takes the FLOP/s of a
    matrix product on these devices, measured on all ranks at once, for the peak. `memory`: the largest rank's.
    """
    device, experiment, rows = trainer.device, trainer.experiment, trainer.bench_rows
    dtype = compute_dtype(experiment.model)
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(device) / 2**30
    else:
        memory = peak_rss_gib()
    largest = torch.tensor(memory, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.barrier()
    peak = torch.tensor(measured_peak_flops(device, dtype), dtype=torch.float64, device=device)
    dist.all_reduce(peak)
    if trainer.rank != 0 or not rows:
        return
    training = sum(mean_of(rows, key) for key in _TRAINING)
    report = build_report(
        "trainer",
        kind=experiment.kind,
        setting={
            "model": experiment.model.name,
            "ranks": trainer.world_size,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "dtype": experiment.model.dtype,
            **trainer.bench_setting,
        },
        figures={
            "s/step": mean_of(rows, "time/step"),
            "tokens/step": mean_of(rows, "num_tokens"),
            "tokens/s": mean_of(rows, "num_tokens") / max(training, 1e-9),
            "tokens/s overall": mean_of(rows, "tokens_per_s_overall", "time/step"),
            "mfu": mean_of(rows, "mfu", "time/forward_backward"),
            "mfu of measured": mean_of(rows, "step_flops") / max(training, 1e-9) / float(peak),
            "measured TFLOP/s": float(peak) / 1e12,
            "memory, GiB": float(largest),
        },
        phases=phases_of(rows),
        rows=rows,
    )
    write_report(trainer.paths.root, report)
    if trainer.metrics is not None:
        trainer.metrics.log_bench(len(rows), results(report))
    logger.info("\n" + table(report))
