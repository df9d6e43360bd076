"""FSDP2 training for RL and SFT: one engine, one train step, versions published for the engines to load."""
