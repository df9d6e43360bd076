"""Training again, without inference: a whole run on its stored batches, or one step that was refused.

    python -m prime_hpc.trainer.replay RUN SCRATCH --after 0 --until 7     # steps 1..7, one row a step in SCRATCH
    python -m prime_hpc.trainer.replay RUN/failed/step_000007              # the kept step, and its worst sequences

Also under torchrun. `dump_failed_step` is what the trainer calls when a step is refused, `replay` does both of the
above. People call `prime-hpc replay`.
"""
