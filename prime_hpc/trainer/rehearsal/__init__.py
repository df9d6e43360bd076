"""A trainer's memory before there is a trainer: its own train step on tensors that have shapes but no values.

    python -m prime_hpc.trainer.rehearsal RUN_DIR          # what `prime-hpc plan --rehearse` starts; prints JSON

- `tracker`: counts storages by kind, of real tensors and of fake ones alike;
- `pretend`: the world in which the train step runs: a process group of which only this rank exists, kernels of a GPU,
  host memory, weights that nobody reads;
- `images`: what a model that sees images is shown there;
- `rehearse`: model, optimizer and two steps of the real code in that world, and the report.
"""
