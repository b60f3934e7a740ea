"""The worker: runs step plans on one device."""
