"""Look up model names without importing torch, so that a wrong name is rejected before anything heavy is loaded."""

import re
from typing import Any, NamedTuple

from trainables.config.models import ARGUMENTS, keywords_of
from trainables.errors import ModelError, closest_matches
from trainables.models.libraries import LIBRARIES
from trainables.models.libraries.interface import Library, installed
from trainables.models.libraries.ours import MODELS
from trainables.user_code import model_parts, option_key


class ModelName(NamedTuple):
    """A key of LIBRARIES and the model's name there; `A+B`, two models, belongs to ours."""

    library: str
    name: str
    arguments: str = ""
    """Further constructor arguments in Python syntax: `drop_path_rate=0.1, depth=6`."""

    @property
    def kwargs(self) -> dict[str, Any]:
        return keywords_of(self.arguments)

    def is_built_as(self, other: "ModelName") -> bool:
        """Whether `other`, the model of some weights, is this model. Without arguments, this one matches any.

        Models in files are compared by class only, as a file may have moved and a run has a copy of it.
        """
        return self.key == other.key and (not self.arguments or self.kwargs == other.kwargs)

    @property
    def key(self) -> tuple[str, str]:
        """The library and the name, without a file's path."""
        return self.library, option_key(self.name)


def library_of(name: str) -> tuple[Library, str]:
    """Return a model's library and its name there; for `A+B` those of A. Raises ModelError: see `check_model_name`."""
    found = check_model_name(model_parts(name)[0])
    return LIBRARIES[found.library], found.name


def check_model_name(name: str) -> ModelName:
    """Find the first library that has the model `name`; `timm/NAME` is timm's, and `A+B` two models. Does not import torch.

    A name may end in constructor arguments, `NAME(drop_path_rate=0.1)`.

    Raises ModelError: there is no such model (the message has the most similar name), or its library is not installed.
    """
    if len(parts := model_parts(name)) > 1:
        for part in parts:
            check_model_name(part)
        return ModelName("ours", name)
    if with_arguments := ARGUMENTS.fullmatch(name):
        keywords_of(with_arguments[2])
        return check_model_name(with_arguments[1])._replace(arguments=with_arguments[2])
    for key, library in LIBRARIES.items():
        if (found := library.find(name)) is not None:
            return ModelName(key, found)
    known = [*(each for library in LIBRARIES.values() for each in library.names())]
    if (bare := re.split(r"[/:.]", name)[-1].lower()) != name.lower() and bare in known:
        raise ModelError(f"there is no model {name!r}; did you mean {bare}?")
    if "/" in name:
        raise ModelError(f"there is no model {name!r}; for a Hugging Face Hub repository write hf-hub:{name}")
    lower = name.lower()
    # Completing one of our names beats spelling similarity: vgg8 is vgg8_cifar, not vgg11.
    completions = [model for model in MODELS if lower and lower not in MODELS and model.startswith(lower)]
    similar = ([lower] if lower in known else []) + completions or closest_matches(lower, known)
    instead = (
        f"did you mean {' or '.join(similar[:2])}?"
        if similar
        else f"choose one of {', '.join(MODELS)}, or a torchvision or timm model (timm/NAME)"
    )
    without_timm = "" if installed("timm") else " (timm's models need `pip install raydistill[timm]`)"
    raise ModelError(f"there is no model {name!r}; {instead}{without_timm}")
