"""Models in a user's file: FILE.py:NAME is a class, or a function that returns a model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainables.errors import DistillError, ModelError, first_line
from trainables.models.libraries.interface import Library
from trainables.user_code import MODULE_PREFIX, file_of, module_of, option_key

if TYPE_CHECKING:
    from torch import nn


class OwnFile(Library):
    """NAME is called with `num_classes`, and `image_size` if its signature has it. With 0 classes the model returns features."""

    name = "file"
    modules = MODULE_PREFIX

    def find(self, name: str) -> str | None:
        """Return `name` with the file's path, or its copy's if this process uses copies. The file need not exist."""
        if name.endswith(".py"):
            raise ModelError(f"model {name} is a file: add the class in it, as {name}:CLASS")
        path = file_of(name)
        return None if path is None else f"{path}:{option_key(name)}"

    def create(self, name: str, num_classes: int, image_size: int, kwargs: Mapping[str, Any]) -> nn.Module:
        from torch import nn

        path = file_of(name)
        assert path is not None
        if not path.is_file():
            raise ModelError(f"model {name}: {path} does not exist: write the file's current path, as FILE.py:CLASS")
        try:
            build = getattr(module_of(path.resolve()), option_key(name))
            sizes = {"image_size": image_size} if "image_size" in inspect.signature(build).parameters else {}
            model = build(num_classes=num_classes, **{**sizes, **kwargs})
        except DistillError:
            raise
        except (Exception, SystemExit) as error:  # a user's code may fail in any way
            raise ModelError(f"model {name} cannot be built ({type(error).__name__}: {first_line(error)})") from error
        if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
            what = f"{type(model).__name__} without parameters" if isinstance(model, nn.Module) else type(model).__name__
            raise ModelError(f"model {name} is a {what}: name an nn.Module class, or a function that returns a module")
        if not num_classes:
            model.num_classes = 0  # type: ignore[assignment]
        return model
