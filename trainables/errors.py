"""Errors that a user can cause. Each ends a command with its one message: what is wrong, where, what to write instead."""

from __future__ import annotations

import re

NO_MEMORY = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)
"""What cuBLAS, cuDNN, NCCL and torch's CPU allocator say where a GPU's or the host's memory has run out."""


class DistillError(Exception):
    """Base of every error that a user can cause and mend; its text is shown without a stack trace."""


class ExperimentError(DistillError):
    """An experiment file or an override that cannot be carried out as written."""


class DataError(DistillError):
    """Missing, empty, unreadable or inconsistent data."""


class ModelError(DistillError):
    """A model name or weights that do not exist or do not fit."""


class CheckpointError(DistillError):
    """A checkpoint that is missing, damaged, of another model, or that cannot be written."""


class ClusterError(DistillError):
    """Ray, its resources or its storage cannot hold what was asked."""


class TrainingError(DistillError):
    """Training stopped by one of its own checks: a loss that is not finite, replicas that disagree."""
