"""Kubernetes: a run as pods. Manifests and a Helm chart of an experiment, and what stands in a pod for srun."""
