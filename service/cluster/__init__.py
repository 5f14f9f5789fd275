"""Connects to a Ray cluster or a local Ray, and knows its resources."""
