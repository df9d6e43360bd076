"""Supervised data: any data set's rows to token-exact, packed batches, streamed, shuffled and resumable exactly.

    sources (rows by number) -> messages -> template (tokens, loss mask) -> stream (order, steps, ranks) -> prefetch

`build.build_data` puts it together for `trainer/sft.py`.
"""
