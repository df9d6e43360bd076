"""Versions that go from the trainer's memory into the engines' over the network (`weights.transport: gloo`, `nccl`).

    trainer's ranks   gather whole tensors, each its share (`trainer.weights.gathering`)  ->  an image of its file in
                      host memory (`sender`)  ->  a small manifest, announced as every version is
    a server          reads it, joins each rank once (`link`), has it hold the version  ->  pause
                      ->  every worker receives, rank by rank, bucket by bucket, straight into the model  ->  resume

A server and a rank talk over a connection on which both have proven to know the job's secret; there they agree on a
process group of their own (`group`): the rank, which sends, and all workers of the server. So servers do not wait for
one another, one that dies takes no other with it, and one that comes back joins anew and gets the version that the
ranks hold. Images are known by the sum of their bytes: a version of another attempt is never mistaken for it.

Whole versions come between, as files (`weights.whole_interval`, at checkpoints, at the end): what evaluation, export
and resume read, and what an engine loads whose transfer broke off.
"""
