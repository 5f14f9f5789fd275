"""Configuration of the models: student, teachers and assistants."""

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
"""Prefixes of models that come with weights: in a folder with timm's or transformers' config.json, or on the Hugging Face Hub."""
ARGUMENTS = re.compile(rf"({FOLDER_SCHEME}.+?(?=\(\w+=)|(?!{FOLDER_SCHEME}).+?)\((.*)\)")
"""A model's name followed by the arguments of its constructor; a folder's name may contain parentheses too."""

REUSE_SEPARATOR = "+"
"""STUDENT+TEACHER is a student that uses the teacher's classifier, see `trainables.models.reused_classifier`."""


def with_arguments(name: str, arguments: Mapping[str, Any]) -> str:
    """Add constructor arguments, plain values, to those already in a model's name. Raises ModelError."""
    written = ARGUMENTS.fullmatch(name)
    base, known = (written[1], keywords_of(written[2])) if written else (name, {})
    text = ", ".join(f"{key}={value!r}" for key, value in {**known, **arguments}.items())
    return f"{base}({text})" if text else base


def keywords_of(text: str) -> dict[str, Any]:
    """Parse `key=value, …` with Python literals as values. Raises ModelError for anything else."""
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
        description="ours, torchvision's or timm's (`timm/NAME`), `local-dir:FOLDER`, `hf-hub:OWNER/NAME`, or FILE.py:CLASS",
    )
    args: dict[str, Any] = Field({}, description="arguments for the library's constructor, plain values")

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
        description="initial weights, as teacher.weights, with the classifier if it has the data's classes; absent: random",
    )
    weights_key: str | None = Field(None, min_length=1, description="as teacher.weights_key")
    freeze: bool = Field(False, description="train only the classifier")


class WeightedConfig(ModelConfig):
    """A model whose weights may be in a file, or come with its name (`hf-hub:OWNER/NAME`, `local-dir:FOLDER`)."""

    image_size: ImageSize | None = Field(
        None,
        description="height and width of its input; absent: that of the crops, or the size in its weights if it takes no other",
    )
    mean: Mean | None = Field(None, description="per-channel mean of its input; absent: as in its weights, else data.mean")
    std: Std | None = Field(
        None,
        description="per-channel std of its input; absent: as in its weights, else data.std",
    )
    weights_key: str | None = Field(
        None,
        min_length=1,
        description="entry or key prefix in a weights file, such as `state_dict`; absent: the one that fits, EMA weights first",
    )
    weights: str | None = Field(
        None,
        min_length=1,
        description="a checkpoint, a published name, a file or folder, `hf-hub:OWNER/NAME`; absent: trained first",
    )
    classes: str | None = Field(
        None,
        min_length=1,
        description="a .npy file of (K, D) floats, one embedding per class; the .txt next to it names them, else they are in "
        "the data's order",
    )
    logit_scale: Positive | None = Field(
        None, description="factor from the cosine to `classes` or class means to logits; absent: 100, as in CLIP"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] | None = Field(
        None, description="precision of its forward passes; absent: as precision"
    )
    cache: str | None = Field(
        None,
        min_length=1,
        description="folder that all nodes share, for the outputs of the teacher and the assistants; runs may share it too",
    )
    cache_top_k: Count | None = Field(None, description="store only the k largest logits and the sum of the rest")
    cache_epochs: Count | None = Field(
        None, description="epochs with different augmentations, which then repeat; absent: all differ"
    )
    cache_feature_dtype: Literal["float16", "fp8"] | None = Field(
        None, description="dtype of stored features; fp8: e4m3; absent: float16"
    )

    @field_validator("cache")
    @classmethod
    def _check_cache_folder(cls, cache: str | None) -> str | None:
        if cache is not None and "://" in cache:
            raise ValueError("must be a folder that all nodes mount, not a URI")
        if cache is not None and "\0" in cache:
            raise ValueError("must be a folder: a path cannot contain the character NUL")
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
        """The file of class embeddings and the logit scale; None without such a file."""
        return None if self.classes is None else (self.classes, self.scale)

    @property
    def scale(self) -> float:
        """`logit_scale`, or CLIP's 100."""
        return self.logit_scale or 100.0

    @property
    def embeds_classes(self) -> bool:
        """Whether its logits are scaled cosines to class embeddings."""
        return self.classes is not None

    @property
    def rows_from(self) -> str | None:
        """The key of what gives rows of the teacher's outputs in place of a network in each worker; None: neither."""
        return "teacher.cache" if self.cache is not None else None


class TeacherOfSeveralConfig(WeightedConfig):
    """One of several teachers; it must have been trained before."""

    weights: str = Field(min_length=1, description="as teacher.weights")
    share: Positive = Field(1.0, description="its weight relative to the sum over all teachers")


class TeacherConfig(WeightedConfig):
    """The teacher model."""

    finetune: bool | None = Field(
        None,
        description="first fine-tune `weights`, with a new classifier if the classes differ; absent: only if they differ and a "
        "method reads logits",
    )
    head: Literal["class_means"] | None = Field(
        None,
        description="a classifier without training: the cosine to the mean feature of each class",
    )
    epochs: Count | None = Field(None, description="epochs of its training or fine-tuning; absent: optim.epochs")
    lr: Positive | None = Field(None, description="peak learning rate of its training or fine-tuning; absent: optim.lr")
    lr_head: Positive | None = Field(None, description="peak learning rate of its classifier; absent: teacher.lr")
    layer_decay: LayerDecay | None = Field(None, description="as optim.layer_decay")
    service: Annotated[Count, Field(le=1024)] | None = Field(
        None, description="number of Ray actors that run it for all students, instead of a copy in each worker"
    )
    placement: Literal["auto", "whole", "sharded"] = Field(
        "auto",
        description="whole: a copy in each worker; sharded: its parameters divided among them; auto: whole if it fits on a GPU",
    )

    @property
    def needs_training(self) -> bool:
        """Whether the run must train it first, as a stage of its own."""
        return self.weights is None or bool(self.finetune)

    @property
    def embeds_classes(self) -> bool:
        return self.classes is not None or self.head is not None

    @property
    def rows_from(self) -> str | None:
        return super().rows_from or ("teacher.service" if self.service is not None else None)


class AssistantConfig(ModelConfig):
    """A model between teacher and student: it learns from the model before it and teaches the one after it."""

    epochs: Count | None = Field(None, description="epochs of its training; absent: optim.epochs")
