"""Detect, explain and end hangs of workers."""
