"""What is known of the running server: for ``info`` and for the planner."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from leyline_client._errors import InternalError
from leyline_client._models import MAX_DIRECTIVES, MAX_TOKENS, PROTOCOL_VERSION, Mode
from leyline_client._version import __version__
from leyline_client._wire import Limits, RopeInfo, ServerInfo

from . import compat, shared
from .refusals import argument_refusals
from .sessions import Sessions
from .turns import ServerFacts


class Facts:
    """Reads what the scheduler found out (see `shared.write_facts`), once it is there."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._known: dict[str, Any] | None = None

    def read(self) -> dict[str, Any]:
        """The scheduler's facts, or why there are none."""
        if self._known is None:
            self._known = shared.read_facts()
        if self._known is not None:
            return self._known
        missing = argument_refusals(self._manager.server_args)
        return {"refusals": missing or ["not_ready: the scheduler has not reported yet"]}

    def for_planner(self) -> ServerFacts:
        """What planning depends on."""
        facts = self.read()
        return ServerFacts(
            int(facts.get("page_size", 1)), self._manager.model_config.vocab_size, tuple(facts["refusals"])
        )

    def info(self, sessions: Sessions) -> ServerInfo:
        """The answer of ``GET info``."""
        facts, config = self.read(), self._manager.model_config
        enabled = not facts["refusals"]
        return ServerInfo(
            protocol=PROTOCOL_VERSION,
            extension_version=__version__,
            sglang_version=compat.sglang_version(),
            model=self._manager.served_model_name,
            enabled=enabled,
            refusals=tuple(facts["refusals"]),
            modes=tuple(Mode) if enabled else (Mode.FORGET,),
            page_size=int(facts.get("page_size", 1)),
            context_length=config.context_len,
            vocab_size=config.vocab_size,
            kv_dtype=str(facts.get("kv_dtype", "unknown")),
            rope=RopeInfo.model_validate(facts["rope"]) if facts.get("rope") else None,
            limits=Limits(
                max_directives=MAX_DIRECTIVES,
                max_tokens=MAX_TOKENS,
                max_sessions=sessions.limit,
                session_ttl_s=sessions.ttl,
            ),
            fidelity=_fidelity_card(),
        )


def _fidelity_card() -> dict[str, Any] | None:
    """The card named by ``LEYLINE_FIDELITY_CARD``, if any."""
    path = os.environ.get("LEYLINE_FIDELITY_CARD")
    if not path:
        return None
    try:
        card: dict[str, Any] = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InternalError(f"LEYLINE_FIDELITY_CARD cannot be read: {type(error).__name__}") from None
    return card
