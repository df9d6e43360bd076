"""Weight versions: plan, write and publish safetensors that engines load."""
