"""vLLM server, weight-update endpoints, data-parallel placement. Started as `python -m prime_hpc.inference.main`."""
