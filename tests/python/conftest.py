"""Makes the helpers in this folder importable from every test, wherever pytest is started."""
