"""The base class of all configuration sections, and the number types that they share."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

Count = Annotated[int, Field(ge=1, lt=2**31)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
LayerDecay = Annotated[float, Field(gt=0, le=1)]
ImageSize = Annotated[int, Field(ge=1, le=4096)]


def _per_channel(written: Any, info: ValidationInfo) -> Any:
    """Refuse values for pixels in [0, 255] or for one channel, and say what to write; the types refuse everything else."""
    values = list(written) if isinstance(written, list | tuple) else [written]
    if len(values) not in (1, 3) or not all(type(value) in (int, float) and 0 <= value <= 255 for value in values):
        return written
    if info.field_name == "std" and 0 in values:
        return written
    of_bytes = max(values) > 1
    if not of_bytes and len(values) == 3:
        return written
    three = [float(f"{value / 255:.4g}") if of_bytes else value for value in values] * (3 // len(values))
    scale = "pixels are in [0, 1], not [0, 255]: divide mean and std by 255" if of_bytes else "images have three channels"
    raise ValueError(f"{scale}: write {info.field_name}: {three}")


Mean = Annotated[tuple[Probability, Probability, Probability], BeforeValidator(_per_channel)]
_Deviation = Annotated[float, Field(gt=0, le=1)]
Std = Annotated[tuple[_Deviation, _Deviation, _Deviation], BeforeValidator(_per_channel)]


def _refuse_booleans(schema: Any) -> Any:
    """Make all integers and floats in a pydantic schema, at any depth, refuse booleans before any other check.

    Python counts true as 1, but a user who writes `true` for a number has mistaken the key. Each branch of a union and each
    element of a list gets its own error, which a field validator could not give. Nested sections have their own schemas.
    """
    if isinstance(schema, list):
        return [_refuse_booleans(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") in ("int", "float"):
        check = partial(_refuse_boolean, f"{schema['type']}_type")
        return core_schema.no_info_before_validator_function(check, cast(CoreSchema, schema))
    return {key: part if key in _NO_SCHEMAS else _refuse_booleans(part) for key, part in schema.items()}


_NO_SCHEMAS = ("metadata", "serialization", "default", "config")
"""Keys of a pydantic schema whose values are not schemas."""


def _refuse_boolean(error: Any, value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticKnownError(error)
    return value


class Section(BaseModel):
    """One frozen part of an experiment; refuses unknown keys, and booleans, infinities and NaN as numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = _refuse_booleans(handler(source))
        return schema
