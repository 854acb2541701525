"""What an arm means: which policies a session gets and in which mode. Imports the client only to make a session.

Named arms are the four of the experiment. ``<policy>+<mode>`` makes one of any registered policy, with parameters as
the client writes them (``truncate-older-than-n:n=3+amortize``), and ``<policy>&<policy>+<mode>`` of several.
"""

from __future__ import annotations

import importlib
import re
import secrets
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, get_args

Mode = Literal["amortize", "forget"]

DEFAULT_ARMS = ("keep-all", "truncate+forget", "truncate+amortize", "stale+amortize")

# Arms name folders, so there is no slash in them.
_POLICY = re.compile(r'[a-z0-9]+(-[a-z0-9]+)*(:[\w.,="\-]+)?')
_SHORT = {"truncate": "truncate-older-than-n", "stale": "stale-tool-detector"}


class UnknownArmError(ValueError):
    """An arm's name that cannot be read."""


@dataclass(frozen=True)
class Arm:
    """The session settings of one arm; without policies nothing is ever edited."""

    name: str
    policies: tuple[str, ...]
    mode: Mode


def parse_arm(name: str) -> Arm:
    """Read an arm's name. Whether its policies are registered is found out when the session is made.

    Raises:
        UnknownArmError: when the name is neither ``keep-all`` nor ``<policy>[&<policy>...]+<mode>``.
    """
    if name == "keep-all":
        return Arm(name, (), "amortize")
    policies, plus, mode = name.rpartition("+")
    chosen = tuple(_SHORT.get(policy, policy) for policy in policies.split("&"))
    if not plus or mode not in get_args(Mode) or not all(map(_POLICY.fullmatch, chosen)):
        raise UnknownArmError(f"arm {name!r}: expected keep-all or <policy>+amortize or <policy>+forget")
    return Arm(name, chosen, "amortize" if mode == "amortize" else "forget")


def leyline_session(base_url: str, arm: str, seed: int) -> Any:  # noqa: ARG001 - the factory's signature
    """Make a ``LeylineSession`` with the settings of ``arm``; the default session factory.

    Every session has a cache salt of its own: arms send the same prompts, and without it a later run would find the
    KV of an earlier one and cost less than it does.

    Raises:
        UnknownArmError: for a name that cannot be read.
    """
    settings = parse_arm(arm)
    # By name: the client belongs to whoever runs the experiment, and tests and recordings do without it.
    client = importlib.import_module("leyline_client")
    return client.LeylineSession(
        base_url, policies=list(settings.policies), mode=settings.mode, cache_salt=secrets.token_hex(16)
    )


def openai_session(base_url: str, arm: str, seed: int) -> Any:  # noqa: ARG001 - the factory's signature
    """Make a plain OpenAI client with a cache salt: for ``keep-all`` against an SGLang without the extension.

    Raises:
        UnknownArmError: for any other arm, which such a client cannot run.
    """
    if parse_arm(arm).policies:
        raise UnknownArmError(f"arm {arm!r} edits, which a plain OpenAI client cannot do")
    return _SaltedClient(base_url.rstrip("/") + "/v1")


class _SaltedClient:
    """``chat.completions.create`` of an OpenAI client, with the same ``cache_salt`` in every body."""

    def __init__(self, base_url: str) -> None:
        openai = importlib.import_module("openai")
        self._client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)
        self._salt = secrets.token_hex(16)
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _create(self, *, extra_body: dict[str, Any] | None = None, **request: Any) -> Any:
        body = {"cache_salt": self._salt, **(extra_body or {})}
        return self._client.chat.completions.create(extra_body=body, **request)
