"""The numbers of the emulated GPU: each operation is launched as it is, by kernels that do nothing, then computed on CPU tensors
over the same memory.

What torch itself does on the device stays as it is: where outputs lie, which strides they have, what synchronises, and copies of
plain memory. Operations whose host code reads what a kernel has computed are computed on the CPU alone. An operation that the CPU
does not have, such as a fused attention, is an error.
"""

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten

LAUNCHED_ONLY = {"_pin_memory", "empty", "empty_like", "empty_strided", "is_pinned", "new_empty", "new_empty_strided"} | {
    *("_local_scalar_dense", "item", "record_stream", "resize_", "set_")
}
"""They compute nothing, or read memory as it is."""
READ_BY_HOST = {"_unique", "_unique2", "allclose", "argwhere", "bincount", "equal", "histc", "is_nonzero", "masked_select"} | {
    *("nonzero", "repeat_interleave", "unique_consecutive", "unique_dim", "unique_dim_consecutive"),
    *(
        "_linalg_eigh",
        "_linalg_svd",
        "linalg_eig",
        "linalg_eigh",
        "linalg_eigvalsh",
        "linalg_lstsq",
        "linalg_svd",
        "linalg_svdvals",
    ),
}
"""They synchronise: a size depends on values, or a solver on whether it has converged."""
SOLVERS = {"_linalg_det", "_linalg_slogdet", "_linalg_solve_ex", "cholesky_inverse", "cholesky_solve", "linalg_cholesky_ex"} | {
    *("linalg_inv_ex", "linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_qr", "linalg_solve_triangular")
}
"""They do not, but no emulated library can say how large their workspaces are."""


def _batch_norm(images: Tensor, *args: Any) -> Any:
    return aten.native_batch_norm(images, *args)


def _batch_norm_backward(images: Tensor, gradient: Tensor, weight: Tensor, *args: Any) -> Any:
    running_mean, running_variance, saved_mean, saved_variance, epsilon, _ = args
    statistics = (running_mean, running_variance, saved_mean, saved_variance)
    return aten.native_batch_norm_backward(gradient, images, weight, *statistics, True, epsilon, [True] * 3)


def _softmax(softmax: Any) -> Callable[..., Tensor]:
    """A softmax, which on a GPU takes half precision and gives single."""
    return lambda logits, dim, half_to_float: softmax(logits.float() if half_to_float else logits, dim, False)


def _softmax_backward(backward: Any) -> Callable[..., Tensor]:
    return lambda gradient, output, dim, dtype: backward(gradient, output, dim, gradient.dtype).to(dtype)


ON_CPU: dict[str, Callable[..., Any]] = {
    "cudnn_batch_norm": _batch_norm,
    "cudnn_batch_norm_backward": _batch_norm_backward,
    "_softmax": _softmax(aten._softmax),
    "_log_softmax": _softmax(aten._log_softmax),
    "_softmax_backward_data": _softmax_backward(aten._softmax_backward_data),
    "_log_softmax_backward_data": _softmax_backward(aten._log_softmax_backward_data),
}
"""Operations of the GPU alone, or with other arguments there."""


class Numbers(TorchDispatchMode):
    """Computes the operations of a thread; see the module."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no operation is compiled, and to import what would skip it takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.namespace not in ("aten", "torchvision") or types or name in LAUNCHED_ONLY:
            return func(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        if any(tensor.is_cuda for tensor in inputs):
            if _is_read_by_host(name, args):
                torch.cuda.current_stream().synchronize()  # an error where torch is set to forbid it
                return _compute_alone(func, args, kwargs)
            if name in SOLVERS:
                return _compute_alone(func, args, kwargs)
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        if not any(tensor.is_cuda for tensor in inputs + outputs):
            return result
        memory = {tensor.untyped_storage()._cdata for tensor in inputs}
        new = [tensor.untyped_storage()._cdata not in memory for tensor in outputs]
        if any(new) or _written(func, args, kwargs) is not None:  # else it is a view
            _compute(func, args, kwargs, outputs, new)
        return result


def _is_read_by_host(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the host waits for a result of it, as for the size of what a mask selects."""
    indices = _tensors(args[1]) if "index" in name and len(args) > 1 and isinstance(args[1], list | tuple) else []
    return name in READ_BY_HOST or any(tensor.dtype in (torch.bool, torch.uint8) for tensor in indices)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation writes of its arguments, the first of them; None: nothing."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[position] if position < len(args) else kwargs.get(argument.name)
    return None


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _on_cpu(leaf: Any) -> Any:
    """A CPU's tensor over the memory of a GPU's; what else an operation takes, as it takes it on a CPU."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu") if leaf.type == "cuda" else leaf
    if isinstance(leaf, torch.Generator):
        return None if leaf.device.type == "cuda" else leaf  # see `_Seeded`
    if not isinstance(leaf, Tensor) or not leaf.is_cuda:
        return leaf
    storage = leaf.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=leaf.dtype).set_(whole, leaf.storage_offset(), leaf.size(), leaf.stride())


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor], new: list[bool]) -> None:
    """Compute an operation in the memory of its arguments and of its new outputs."""
    generator = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)), None)
    if "pin_memory" in kwargs:
        kwargs = {**kwargs, "pin_memory": None}
    cpu_args, cpu_kwargs = tree_map(_on_cpu, (args, kwargs))
    on_cpu = ON_CPU.get(func.overloadpacket.__name__, func)
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    with _Seeded(generator) if is_random else contextlib.nullcontext():
        values = _tensors(on_cpu(*cpu_args, **cpu_kwargs))
    for output, value, is_new in zip(outputs, values, new, strict=False):  # cuDNN's have one more, of its own
        if is_new and value.numel() > 0:
            _on_cpu(output).copy_(value)


def _compute_alone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on the CPU, without any launch."""
    device = next(tensor.device for tensor in _tensors((args, kwargs)) if tensor.is_cuda)
    cpu_args, cpu_kwargs = tree_map(_on_cpu, (args, kwargs))
    result = func(*cpu_args, **cpu_kwargs)
    written = _written(func, args, kwargs)
    return written if written is not None else tree_map(lambda leaf: _on_gpu(leaf, device), result)


def _on_gpu(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    copy = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=device)
    _on_cpu(copy).copy_(leaf)
    return copy


class _Seeded:
    """The CPU draws what belongs to the state of a generator of the GPU, and is left as it was."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator

    def __enter__(self) -> None:
        generator = self._generator or torch.cuda.default_generators[torch.cuda.current_device()]
        self._before = torch.default_generator.get_state()
        if generator.device.type == "cuda":
            torch.default_generator.manual_seed(hash((generator.initial_seed(), generator.get_offset())) % 2**63)

    def __exit__(self, *_: object) -> None:
        torch.default_generator.set_state(self._before)


def turn_on() -> None:
    """Compute the operations of this thread, and of those that start from now on."""
    run, text_of = threading.Thread.run, torch._tensor_str._tensor_str

    def run_with_numbers(thread: threading.Thread) -> None:
        with Numbers():  # type: ignore[no-untyped-call]
            run(thread)

    threading.Thread.run = run_with_numbers  # type: ignore[method-assign, assignment]
    # torch formats a tensor without any mode.
    torch._tensor_str._tensor_str = lambda tensor, indent: text_of(_on_cpu(tensor), indent)
    Numbers().__enter__()  # type: ignore[no-untyped-call]
