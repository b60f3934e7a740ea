"""Makes the helpers in this folder importable from every test."""
