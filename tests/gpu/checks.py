"""All checks by their numbers in the plan, in the order in which they are run."""

from tests.gpu import (
    check_compile,
    check_decoders,
    check_input,
    check_nccl,
    check_out_of_memory,
    check_peak_memory,
    check_pytest,
    check_ranks,
    check_ray,
    check_several_gpus,
    check_speed,
    check_telemetry,
)

CHECKS = (
    check_pytest.CHECK,
    check_out_of_memory.CHECK,
    check_peak_memory.CHECK,
    check_speed.CHECK,
    check_input.CHECK,
    check_decoders.CHECK,
    check_ranks.CHECK,
    check_nccl.CHECK,
    check_telemetry.CHECK,
    check_ray.CHECK,
    check_several_gpus.CHECK,
    check_compile.CHECK,
)
