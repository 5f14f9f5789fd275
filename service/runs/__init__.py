"""Carries out a run: plans, checks and trains it stage by stage, shows it, and writes it to a directory."""
