"""The trainer's side of a batch: micro-batches, the rows that a rank computes, prefetch to the device."""
