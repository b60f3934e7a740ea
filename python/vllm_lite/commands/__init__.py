"""The commands of ``vllm-lite`` beside ``serve`` and ``bench``."""
