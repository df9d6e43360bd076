"""Finished groups to the trainer's batches: scored (`algorithms`), which of them train, packed, written."""
