"""The tasksets that prime-hpc ships, in verifiers' v1 form; `prime_hpc.envs.env_config.BUNDLED` names them."""
