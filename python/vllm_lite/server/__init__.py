"""The OpenAI-compatible HTTP server. Nothing in here imports torch or a model."""
