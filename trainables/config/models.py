"""Which models teach, and which stand between teacher and student."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainables.config.section import Count, ImageSize, LayerDecay, Mean, Positive, Section, Std
from trainables.errors import ModelError

FOLDER_SCHEME = "local-dir:"
HUB_SCHEMES = ("hf-hub:", "hf_hub:")
"""Names of models with weights: a folder with a config.json of timm or transformers, a repository of the Hugging Face Hub."""
ARGUMENTS = re.compile(rf"({FOLDER_SCHEME}.+?(?=\(\w+=)|(?!{FOLDER_SCHEME}).+?)\((.*)\)")
"""A model's name, and the arguments of its constructor behind it; a folder's name may have parentheses too."""

REUSE_SEPARATOR = "+"
"""STUDENT+TEACHER is a student that predicts with the teacher's classifier, see `trainables.models.reused_classifier`."""


def with_arguments(name: str, arguments: Mapping[str, Any]) -> str:
    """The name of a model that is built with these arguments, plain values, besides those in its name. Raises ModelError."""
    written = ARGUMENTS.fullmatch(name)
    base, known = (written[1], keywords_of(written[2])) if written else (name, {})
    text = ", ".join(f"{key}={value!r}" for key, value in {**known, **arguments}.items())
    return f"{base}({text})" if text else base


def keywords_of(text: str) -> dict[str, Any]:
    """`key=value, …` with plain values, as Python writes them. Raises ModelError: it is something else."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("only key=value")
        return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ModelError(f"arguments ({text}) of a model cannot be read: write NAME(key=value, …) with plain values") from error


class ModelConfig(Section):
    """A model by name."""

    model: str = Field(
        min_length=1,
        description="a model of ours, torchvision or timm (`timm/NAME`), `local-dir:FOLDER`, `hf-hub:OWNER/NAME`, or your own "
        "FILE.py:CLASS",
    )
    args: dict[str, Any] = Field({}, description="further arguments of the library's constructor, plain values")

    @model_validator(mode="before")
    @classmethod
    def _write_args_in_name(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and isinstance(tree.get("model"), str) and isinstance(tree.get("args"), dict):
            return {**tree, "model": with_arguments(tree["model"], tree["args"]), "args": {}}
        return tree


class StudentConfig(ModelConfig):
    """The model that is trained."""

    weights: str | None = Field(
        None,
        min_length=1,
        description="initial weights, as teacher.weights, with the classifier if its classes are the data's; absent: random",
    )
    weights_key: str | None = Field(None, min_length=1, description="as teacher.weights_key")
    freeze: bool = Field(False, description="train only its classifier")


class WeightedConfig(ModelConfig):
    """A model whose weights may be in a file, or come with its name, as `hf-hub:OWNER/NAME` and `local-dir:FOLDER` do."""

    image_size: ImageSize | None = Field(
        None,
        description="height and width of its input; absent: the crops', or what its weights record if it takes no other",
    )
    mean: Mean | None = Field(None, description="per-channel mean of its input; absent: what its weights record, else data.mean")
    std: Std | None = Field(
        None,
        description="per-channel deviation of its input; absent: what its weights record, else data.std",
    )
    weights_key: str | None = Field(
        None,
        min_length=1,
        description="entry or prefix in a file of weights that is the model, such as `state_dict`; absent: the one that fits, "
        "averages (EMA) first",
    )
    weights: str | None = Field(
        None,
        description="a checkpoint, a published name, a file or folder, `hf-hub:OWNER/NAME`; absent: trained first",
    )
    classes: str | None = Field(
        None,
        description="a .npy file of (K, D) floats, an embedding of each class: named in the .txt next to it, else in the data's "
        "order",
    )
    logit_scale: Positive | None = Field(
        None, description="logits are this times the cosine to `classes` or class means; absent: 100, CLIP's"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] | None = Field(
        None, description="of its forward passes; absent: as precision"
    )
    fold_batch_norms: bool | None = Field(
        None,
        description="fold its batch norms into its convolutions; absent: if its precision is bf16 or fp16",
    )
    cache: str | None = Field(
        None,
        min_length=1,
        description="a folder that all nodes share, which stores its and assistants' outputs for all runs",
    )
    cache_top_k: Count | None = Field(None, description="store the k largest logits and the sum of the rest")
    cache_epochs: Count | None = Field(
        None, description="epochs with different augmentations, which then repeat; absent: all differ"
    )
    cache_feature_dtype: Literal["float16", "fp8"] | None = Field(
        None, description="how features are stored; fp8: e4m3; absent: float16"
    )

    @field_validator("cache")
    @classmethod
    def _check_cache_folder(cls, cache: str | None) -> str | None:
        if cache is not None and "://" in cache:
            raise ValueError("must be a folder that all nodes mount, not a URI")
        if cache is not None and "\0" in cache:
            raise ValueError("must be a folder, and no path has the character NUL in it")
        return cache

    @model_validator(mode="before")
    @classmethod
    def _take_weights_of_name(cls, tree: Any) -> Any:
        name = tree.get("model") if isinstance(tree, dict) else None
        if isinstance(name, str) and name.startswith((FOLDER_SCHEME, *HUB_SCHEMES)):
            if name.startswith(FOLDER_SCHEME):
                name = FOLDER_SCHEME + os.path.abspath(os.path.expanduser(name.removeprefix(FOLDER_SCHEME)))
            return {**tree, "model": name, "weights": tree.get("weights") or name}
        return tree

    @property
    def zero_shot(self) -> tuple[str, float] | None:
        """The file and the scale."""
        return None if self.classes is None else (self.classes, self.scale)

    @property
    def scale(self) -> float:
        """`logit_scale`, or CLIP's."""
        return self.logit_scale or 100.0

    @property
    def embeds_classes(self) -> bool:
        """Whether its logits are cosines to an embedding of each class."""
        return self.classes is not None

    @property
    def rows_from(self) -> str | None:
        """The key of what gives rows of the teacher's outputs in place of a network in each worker; None: neither."""
        return "teacher.cache" if self.cache is not None else None


class TeacherOfSeveralConfig(WeightedConfig):
    """One of several models that are imitated; it has been trained before."""

    weights: str = Field(min_length=1, description="as teacher.weights")
    share: Positive = Field(1.0, description="its weight, divided by the sum of all")


class TeacherConfig(WeightedConfig):
    """The model that is imitated."""

    weights: str | None = Field(
        None,
        description="a checkpoint, a published name, a file or folder, `hf-hub:OWNER/NAME`; absent: trained first",
    )
    finetune: bool | None = Field(
        None,
        description="train `weights` on the labels first, with a new classifier if the classes differ; absent: if they differ "
        "and a method reads logits",
    )
    head: Literal["class_means"] | None = Field(
        None,
        description="a classifier for `weights` without training: the cosine to the mean feature of each class",
    )
    epochs: Count | None = Field(None, description="of its training or fine-tuning; absent: optim.epochs")
    lr: Positive | None = Field(None, description="of its training or fine-tuning; absent: optim.lr")
    lr_head: Positive | None = Field(None, description="of its classifier, as optim.lr_head; absent: teacher.lr")
    layer_decay: LayerDecay | None = Field(None, description="as optim.layer_decay; absent: none")
    service: Annotated[Count, Field(le=1024)] | None = Field(
        None, description="Ray actors that compute its outputs for all students, instead of a network in each worker"
    )
    placement: Literal["auto", "whole", "sharded"] = Field(
        "auto",
        description="whole in each worker, or its parameters sharded over the workers; auto: whole if that fits a GPU",
    )

    @property
    def needs_training(self) -> bool:
        """Whether it is a stage of the run before it teaches."""
        return self.weights is None or bool(self.finetune)

    @property
    def embeds_classes(self) -> bool:
        return self.classes is not None or self.head is not None

    @property
    def rows_from(self) -> str | None:
        return super().rows_from or ("teacher.service" if self.service is not None else None)


class AssistantConfig(ModelConfig):
    """A model between teacher and student: it learns from the one before it and teaches the one after it."""

    epochs: Count | None = Field(None, description="of its training; absent: optim.epochs")
