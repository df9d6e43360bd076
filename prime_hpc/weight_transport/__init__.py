"""How a weight version gets from the trainer into the engines: one protocol on both sides (`transport`)."""
