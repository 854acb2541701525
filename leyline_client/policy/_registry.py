"""Finds policies by name and refuses bad ones before they can do harm, naming the culprit."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError

from leyline_client._errors import PolicyRegistrationError

from ._base import Policy
from ._set import PolicySet
from ._tokens import TokenCounter

GROUP = "leyline.policies"
"""Entry point group: name of the policy → its class (or any callable that takes the parameters by keyword)."""
BUNDLED_PACKAGE = "leyline_policies"
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

PolicySpec = str | Policy | tuple[str, Mapping[str, Any]]
Factory = Callable[..., Policy]


def resolve(policies: Sequence[PolicySpec], *, counter: TokenCounter | None = None) -> PolicySet:
    """The policies that ``policies`` name, in order.

    Each is an object, a name (``"stale-tool-detector"``), a name with parameters
    (``"truncate-older-than-n:n=3,max_chars=500"``; values are JSON or bare words), or ``(name, parameters)``.

    Raises:
        PolicyRegistrationError: a name is unknown, a parameter is wrong, or an object is no policy.
    """
    if isinstance(policies, str):
        raise PolicyRegistrationError("give a list of policies, not one string", policy=policies)
    return PolicySet([_resolve(spec) for spec in policies], counter=counter)


def available() -> dict[str, Factory]:
    """Every policy that can be named: the bundled ones and those of installed packages.

    Raises PolicyRegistrationError like `load`, for the first that is broken.
    """
    return {name: load(name) for name in names()}


def names() -> list[str]:
    """Names of the policies that are registered, broken ones included."""
    return sorted(_targets())


def load(name: str) -> Factory:
    """What makes the policy of that name.

    Raises:
        PolicyRegistrationError: the name is unknown, offered by two packages, or its package cannot be imported.
    """
    targets = _targets()
    if name not in targets:
        raise PolicyRegistrationError(f"unknown; there are {', '.join(sorted(targets))}", policy=name)
    values = list(dict.fromkeys(point.value for point in targets[name]))
    if len(values) > 1:
        raise PolicyRegistrationError(f"offered twice: {' and '.join(values)}", policy=name)
    return _load(name, targets[name][0])


def check(policy: object, source: str = "") -> Policy:
    """``policy`` if it is one. Raises PolicyRegistrationError otherwise; ``source`` names it where it has no name."""
    name = getattr(policy, "name", None)
    called = name if isinstance(name, str) and name else source or type(policy).__name__

    def refuse(why: str) -> PolicyRegistrationError:
        return PolicyRegistrationError(why, policy=called)

    if isinstance(policy, type):
        raise refuse(f"is a class; give an instance, {policy.__name__}(...)")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refuse("its name must be lower-case words joined by dashes, like 'drop-old-logs'")
    plan = getattr(policy, "plan", None)
    if not callable(plan):
        raise refuse("has no method plan(transcript)")
    if inspect.iscoroutinefunction(plan) or inspect.isasyncgenfunction(plan):
        raise refuse("plan must be a plain function: it may not wait for anything")
    try:
        inspect.signature(plan).bind(None)
    except (TypeError, ValueError) as error:
        raise refuse(f"plan must take one argument, the transcript: {error}") from None
    if not isinstance(policy, Policy):
        raise refuse("is no policy")
    return policy


def _resolve(spec: object) -> Policy:
    if isinstance(spec, str):
        name, parameters = parse(spec)
    elif isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[0], str) and isinstance(spec[1], Mapping):
        name, parameters = spec[0], dict(spec[1])
    else:
        return check(spec)
    return build(load(name), name, parameters)


def build(factory: Factory, name: str, parameters: Mapping[str, Any]) -> Policy:
    """``factory(**parameters)``, checked. Raises PolicyRegistrationError naming ``name`` and the parameter at fault."""
    try:
        policy = factory(**parameters)
    except PolicyRegistrationError:
        raise
    except ValidationError as error:
        raise PolicyRegistrationError(_explain(error), policy=name) from None
    except Exception as error:
        raise PolicyRegistrationError(f"cannot be made: {type(error).__name__}: {error}", policy=name) from error
    return check(policy, name)


def _explain(error: ValidationError) -> str:
    faults = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"])
        faults.append(f"parameter {where!r}: {fault['msg']}" if where else str(fault["msg"]))
    return "; ".join(faults)


def _targets() -> dict[str, list[EntryPoint]]:
    # The bundled table also serves a checkout on PYTHONPATH, where no entry points are installed.
    try:
        bundled: Mapping[str, str] = import_module(BUNDLED_PACKAGE).BUNDLED
    except ModuleNotFoundError:
        bundled = {}
    found = {name: [EntryPoint(name, value, GROUP)] for name, value in bundled.items()}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


def _load(name: str, point: EntryPoint) -> Factory:
    try:
        factory = point.load()
    except Exception as error:
        why = f"{point.value} cannot be imported: {type(error).__name__}: {error}"
        raise PolicyRegistrationError(why, policy=name) from error
    if not callable(factory):
        raise PolicyRegistrationError(f"{point.value} is not callable", policy=name)
    declared = getattr(factory, "name", name)
    if declared != name:
        raise PolicyRegistrationError(f"{point.value} calls itself {declared!r}", policy=name)
    made: Factory = factory
    return made


_KEY = re.compile(r"\s*([A-Za-z_]\w*)=")
_DECODER = json.JSONDecoder()


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and parameters of ``name:parameter=value,…``. Raises PolicyRegistrationError where it cannot be read."""
    name, _, rest = spec.partition(":")
    parameters: dict[str, Any] = {}
    position = 0
    while position < len(rest):
        key = _KEY.match(rest, position)
        if key is None:
            why = f"cannot read {rest[position:]!r}: write name:parameter=value,…"
            raise PolicyRegistrationError(why, policy=name)
        parameters[key[1]], position = _value(rest, key.end())
    return name.strip(), parameters


def _value(text: str, start: int) -> tuple[Any, int]:
    """The value that begins at ``start``, JSON or a bare word, and where the next item begins."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        if text[end : end + 1] in ("", ","):
            return value, end + 1
    except ValueError:
        pass
    word = text[start:].partition(",")[0]
    return word, start + len(word) + 1
