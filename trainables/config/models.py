"""Which models teach, and which stand between teacher and student."""

from __future__ import annotations

import math
import os
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from trainables.config.section import Count, ImageSize, Mean, Positive, Section, Std

FOLDER_SCHEME = "local-dir:"
HUB_SCHEMES = ("hf-hub:", "hf_hub:")
"""Names of models with weights: a folder with a config.json of timm or transformers, a repository of the Hugging Face Hub."""


class ModelConfig(Section):
    """A model by name."""

    model: str = Field(
        min_length=1, description="one of ours, torchvision's, timm's (`timm/NAME`), `local-dir:FOLDER` or `hf-hub:OWNER/NAME`"
    )


class StudentConfig(ModelConfig):
    """The model that is trained."""

    weights: str | None = Field(
        None,
        min_length=1,
        description="what it begins with, as teacher.weights; its classifier too where their classes are the data's; absent: "
        "random weights",
    )
    weights_key: str | None = Field(None, min_length=1, description="as teacher.weights_key")


class WeightedConfig(ModelConfig):
    """A model whose weights may be in a file, or come with its name, as `hf-hub:OWNER/NAME` and `local-dir:FOLDER` do."""

    image_size: ImageSize | None = Field(
        None,
        description="height and width of what it sees, to which crops are resized; absent: theirs, or what its weights record "
        "where it takes no other",
    )
    mean: Mean | None = Field(
        None, description="per-channel mean by which its images are normalized; absent: what its weights record, else data.mean"
    )
    std: Std | None = Field(
        None,
        description="per-channel deviation by which its images are normalized; absent: what its weights record, else data.std",
    )

    weights_key: str | None = Field(
        None,
        min_length=1,
        description="the entry of a file of weights, or the prefix of its names, that is the model, such as `state_dict` or "
        "`student`; absent: the one that fits, an average (EMA) before others",
    )

    @model_validator(mode="before")
    @classmethod
    def _take_weights_of_name(cls, tree: Any) -> Any:
        name = tree.get("model") if isinstance(tree, dict) else None
        if isinstance(name, str) and name.startswith((FOLDER_SCHEME, *HUB_SCHEMES)):
            if name.startswith(FOLDER_SCHEME):
                name = FOLDER_SCHEME + os.path.abspath(os.path.expanduser(name.removeprefix(FOLDER_SCHEME)))
            return {**tree, "model": name, "weights": tree.get("weights") or name}
        return tree


class OtherTeacherConfig(WeightedConfig):
    """A further model that is imitated; it has been trained before."""

    weights: str = Field(min_length=1, description="as teacher.weights")
    share: Positive = Field(1.0, description="weight of its probabilities in the mean of all teachers'")


class TeacherConfig(WeightedConfig):
    """The model that is imitated."""

    weights: str | None = Field(
        None,
        description="a checkpoint of ours, a torchvision or timm weight name, a file or folder of weights, `hf-hub:OWNER/NAME`; "
        "absent: trained first",
    )
    epochs: Count | None = Field(None, description="epochs of its training; absent: optim.epochs")
    cache: str | None = Field(
        None,
        min_length=1,
        description="a folder that all nodes share, where its logits, and an assistant's, are stored for all runs",
    )
    cache_top_k: Count | None = Field(None, description="keep the top-k logits of each image and the sum of the rest")
    cache_epochs: Count | None = Field(
        None, description="number of epochs whose augmentations differ, then they repeat; absent: every epoch has its own"
    )
    service: Annotated[Count, Field(le=1024)] | None = Field(
        None, description="number of Ray actors that compute its logits for all students, instead of a network in each worker"
    )
    placement: Literal["auto", "whole", "sharded"] = Field(
        "auto",
        description="its network: whole in each worker, or each has a part of its parameters; auto: whole where that fits a GPU",
    )
    fold_batch_norms: bool | None = Field(
        None, description="fold its batch norms into its convolutions, in each worker; absent: with precision bf16 and fp16"
    )
    share: Positive = Field(1.0, description="weight of its probabilities in the mean with `others`")
    others: tuple[OtherTeacherConfig, ...] = Field(
        (), description="further teachers: the mean of their probabilities is imitated, each counting by its `share`"
    )

    @field_validator("cache")
    @classmethod
    def _check_cache_folder(cls, cache: str | None) -> str | None:
        if cache is not None and "://" in cache:
            raise ValueError("must be a folder that all nodes mount, not a URI")
        if cache is not None and "\0" in cache:
            raise ValueError("must be a folder, and no path has the character NUL in it")
        return cache

    @property
    def logits_only(self) -> str | None:
        """The key of what gives the teacher's logits, and no more of it, in place of a network in each worker; None: neither."""
        return "teacher.cache" if self.cache is not None else "teacher.service" if self.service is not None else None

    @property
    def with_others(self) -> tuple[TeacherConfig | OtherTeacherConfig, ...]:
        """This teacher, then the others."""
        return (self, *self.others)

    @property
    def shares(self) -> tuple[float, ...]:
        """Those of this teacher and the others, as parts of 1."""
        shares = [each.share for each in self.with_others]
        return tuple(share / math.fsum(shares) for share in shares)


class AssistantConfig(ModelConfig):
    """A model between teacher and student: it learns from the one before it and teaches the one after it."""

    epochs: Count | None = Field(None, description="epochs of its training; absent: optim.epochs")

    @model_validator(mode="before")
    @classmethod
    def _refuse_weights(cls, tree: Any) -> Any:
        if isinstance(tree, dict) and "weights" in tree:
            raise ValueError("weights: an assistant is trained here: leave them out")
        return tree
