"""Python runs this as it starts: with EMULATED_GPU_NUMBERS operations are computed in whatever process imports torch, be it of
tests, a spawned rank or a Ray worker."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports torch, and turns the numbers on as soon as it is there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from tests.emulated_gpu.numbers import turn_on

        turn_on()


if os.environ.get("EMULATED_GPU_NUMBERS"):
    sys.meta_path.insert(0, AfterTorch())
