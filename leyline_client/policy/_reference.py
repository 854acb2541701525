"""What every registered policy is and takes, from the code: for listings and the reference page."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ._registry import load, names


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a policy."""

    name: str
    type: str
    """In words, with bounds."""
    default: str
    """As it is written in a spec."""
    doc: str


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """One policy."""

    name: str
    summary: str
    origin: str
    doc: str
    removes_messages: bool
    parameters: tuple[Parameter, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def describe(name: str) -> PolicyInfo:
    """One registered policy. Raises PolicyRegistrationError like `load`."""
    return _describe(name, load(name))


def describe_all() -> list[PolicyInfo]:
    """Every registered policy by name. Raises PolicyRegistrationError for the first that is broken."""
    return [describe(name) for name in names()]


def as_markdown(infos: Sequence[PolicyInfo]) -> str:
    """The reference page."""
    parts = [_HEAD, "| policy | what it does | from |\n|---|---|---|"]
    parts[-1] += "".join(f"\n| [{info.name}](#{info.name}) | {info.summary} | {info.origin} |" for info in infos)
    for info in infos:
        parts.append(f"## {info.name}\n\n{info.doc}")
        if info.removes_messages:
            parts.append("May remove whole messages (calls and results together).")
        rows = [f"| `{p.name}` | {p.type} | `{p.default}` | {p.doc} |" for p in map(_escaped, info.parameters)]
        parts.append("\n".join(["| parameter | type | default | |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


_HEAD = """# Policies

Generated from the code by `leyline policies --markdown`; do not edit.
How to write one: [write-a-policy.md](write-a-policy.md)."""


def _describe(name: str, factory: Any) -> PolicyInfo:
    fields = factory.model_fields if isinstance(factory, type) and issubclass(factory, BaseModel) else {}
    return PolicyInfo(
        name=name,
        summary=str(getattr(factory, "summary", "")),
        origin=str(getattr(factory, "origin", "")),
        doc=inspect.getdoc(factory) or "",
        removes_messages=bool(getattr(factory, "removes_messages", False)),
        parameters=tuple(_parameter(key, field) for key, field in fields.items()),
    )


def _parameter(name: str, field: FieldInfo) -> Parameter:
    doc = " ".join((field.description or "").split())
    return Parameter(name, _type(field), _default(field), doc)


def _default(field: FieldInfo) -> str:
    default = field.default
    if callable(default):
        return str(getattr(default, "__name__", default))
    return json.dumps(default, ensure_ascii=False, default=str)


def _type(field: FieldInfo) -> str:
    name = _type_name(field.annotation)
    bounds = [
        f"{sign} {getattr(rule, attribute)}"
        for rule in field.metadata
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if getattr(rule, attribute, None) is not None
    ]
    return " ".join([name, ", ".join(bounds)]).strip()


def _type_name(annotation: Any) -> str:
    if annotation is None or annotation is type(None):
        return "None"
    text = str(annotation)
    if "Callable" in text:
        return "function"
    if "tuple" in text and "str" in text:
        return "strings"
    if "tuple" in text:
        return "policies"
    if "Literal" in text:
        return " or ".join(f"`{one}`" for one in get_args(annotation))
    if hasattr(annotation, "__members__"):
        return " or ".join(f"`{one.value}`" for one in annotation)
    if isinstance(annotation, type):
        return {"str": "string", "int": "integer", "float": "number", "bool": "true or false"}.get(
            annotation.__name__, annotation.__name__
        )
    if hasattr(annotation, "__metadata__"):
        return _type_name(annotation.__origin__)
    return " or ".join(map(_type_name, get_args(annotation)))


def _escaped(parameter: Parameter) -> Parameter:
    def escape(text: str) -> str:
        return text.replace("|", "\\|")

    return Parameter(parameter.name, parameter.type, escape(parameter.default), escape(parameter.doc))
