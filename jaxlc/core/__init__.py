"""What every other package uses: errors, texts, the names of mesh axes and frozen dataclasses.
Imports no jax.
"""

import dataclasses
from typing import Any, dataclass_transform

from jaxlc.core.axes import (
    BATCH_AXES,
    CONTEXT,
    MESH_AXES,
    TENSOR,
    is_layers,
    mesh_text,
    num_replicas,
)
from jaxlc.core.errors import (
    SettingError,
    Unsupported,
    UserError,
    checked,
    raise_all,
    raise_first,
    reason_of,
)
from jaxlc.core.text import (
    Log,
    Update,
    aligned,
    count_text,
    did_you_mean,
    first_of,
    gib,
    nearest_name,
    no_progress,
    paragraph,
    preformatted,
    print_to_stderr,
    progress_lines,
    suggestion,
)

__all__ = [
    "BATCH_AXES",
    "CONTEXT",
    "Log",
    "MESH_AXES",
    "TENSOR",
    "SettingError",
    "Unsupported",
    "Update",
    "UserError",
    "aligned",
    "checked",
    "count_text",
    "did_you_mean",
    "first_of",
    "frozen_dataclass",
    "gib",
    "is_layers",
    "mesh_text",
    "nearest_name",
    "no_progress",
    "num_replicas",
    "paragraph",
    "preformatted",
    "print_to_stderr",
    "progress_lines",
    "raise_all",
    "raise_first",
    "reason_of",
    "suggestion",
]


@dataclass_transform(
    kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,)
)
def frozen_dataclass(cls: type | None = None, /, **options: bool) -> Any:
    """`dataclasses.dataclass` with fields that are passed by name and never change."""
    return dataclasses.dataclass(cls, frozen=True, kw_only=True, **options)
