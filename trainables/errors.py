"""Errors that a user can cause. Each ends a command with its one message: what is wrong, where, what to write instead."""

from __future__ import annotations


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


class DeviceError(DistillError):
    """A GPU that was reserved for a worker and that torch cannot use."""
