"""Distillation methods: one file each, by name in `registry`, and what they have in common."""
