"""Bodies to models, with the field at fault named."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from leyline_client._errors import InvalidRequest

M = TypeVar("M", bound=BaseModel)


def parse(model: type[M], body: Any, at: str = "") -> M:
    """Validate a body; raises `InvalidRequest` with the path of the first field at fault, under ``at``."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = at
        for step in first["loc"]:
            path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
        raise InvalidRequest(first["msg"].removeprefix("Value error, "), param=path or None) from None
