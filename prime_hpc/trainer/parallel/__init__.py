"""How a model's parameters and a batch's tokens are spread over the trainer's ranks.

    parallel = build_parallel(experiment.trainer.parallel.dims(world_size), device)
    policy = load_policy(config, source, parallel, device, ...)      # model/load_policy.py, which calls `distribute`

- `mesh`: the layout's device meshes and process groups, and this rank's place in them;
- `distribute`: tensor parallel, expert parallel, recomputation, compilation and FSDP2, in this order;
- `tensor`, `expert`: what each dimension does to the modules (context parallelism and the communication that gradients
  flow through: `trainer.ops`);
- `gradients`: sums and norms of gradients whose parameters lie on different meshes.
"""

from prime_hpc.trainer.parallel.mesh import Parallel, build_parallel

__all__ = ["Parallel", "build_parallel"]
