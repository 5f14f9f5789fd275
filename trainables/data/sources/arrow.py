"""Numbers from numpy to Arrow and back. Pyarrow's own conversions import pandas, for half a second and 40 MiB a process."""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def to_arrow(values_n: NDArray[Any]) -> Any:
    """An Arrow array of these numbers."""
    kind = pa.from_numpy_dtype(values_n.dtype)
    return pa.Array.from_buffers(kind, len(values_n), [None, pa.py_buffer(np.ascontiguousarray(values_n))])


def to_numpy(column: Any, dtype: str) -> NDArray[Any]:
    """The numbers of an Arrow array, whose type is `dtype`, not copied. Raises pyarrow.ArrowInvalid: some are missing."""
    if column.null_count or column.offset:
        raise pa.ArrowInvalid("gaps")
    return np.frombuffer(column.buffers()[1] or b"", dtype=dtype, count=len(column))
