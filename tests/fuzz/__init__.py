"""Damaged images and packed sets by the ten thousand: `python -m tests.fuzz images`, `python -m tests.fuzz shards`."""
