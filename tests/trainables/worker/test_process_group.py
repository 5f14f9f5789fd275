"""The arguments of torch's process group."""

from __future__ import annotations

import torch

from trainables.worker.process_group import group_arguments


def test_nccl_is_given_the_workers_own_gpu_whatever_its_global_rank() -> None:
    assert group_arguments("nccl", torch.device("cuda:1")) == {"backend": "nccl", "device_id": torch.device("cuda:1")}
    assert group_arguments("gloo", torch.device("cpu")) == {"backend": "gloo"}
