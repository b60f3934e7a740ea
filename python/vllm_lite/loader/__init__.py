"""Reading checkpoints, configuration and weights: Hugging Face directories and GGUF files."""
