"""The next-token distributions of one case in every arm, from the running server."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from leyline_client import Directive, LeylineClient, LeylineError, Mode, SpliceRequest, TransportError
from leyline_evals.common import EvalError, ServerDown
from leyline_evals.fidelity.compare import Distribution, from_meta
from leyline_evals.fidelity.prompts import Prompt

ARMS = ("amortize", "amortize+erratum", "full+erratum", "forget")
"""What is compared with the two references ``full`` and ``reprefill``. The erratum arms try the repair of 2606.17107:
the history is not prefilled again, words appended to it say what has changed."""

_GREEDY = {"max_new_tokens": 1, "temperature": 0.0}


@dataclass(frozen=True)
class Answer:
    """What the model would say next, and what its KV cost."""

    distribution: Distribution
    prefilled: int | None = None


class Probe:
    """Asks one server. ``top`` is how many log probabilities it is asked for (the server gives at most 100)."""

    def __init__(self, base_url: str, top: int = 100) -> None:
        self.client = LeylineClient(base_url)
        self._http = httpx.Client(base_url=base_url.rstrip("/"), timeout=None, trust_env=False)
        self._top = top
        # One namespace of its own: the arms share the source's KV with each other and with nobody else.
        self._salt = secrets.token_hex(16)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
        self._http.close()

    def reference(self, ids: Sequence[int]) -> Distribution:
        """The clean model's answer to ``ids``, through SGLang's own ``/generate``."""
        body = {
            "input_ids": list(ids),
            "sampling_params": _GREEDY,
            "return_logprob": True,
            "top_logprobs_num": self._top,
            "cache_salt": self._salt,
        }
        try:
            reply = self._http.post("/generate", json=body)
        except httpx.TransportError as error:
            raise ServerDown(f"no answer from {self._http.base_url}: {error}") from error
        if reply.status_code != httpx.codes.OK:
            raise EvalError(f"/generate answered {reply.status_code}: {reply.text[:200]}")
        return from_meta(reply.json()["meta_info"])

    def arm(self, prompt: Prompt, arm: str) -> Answer:
        """The answer in ``arm``.

        Raises:
            EvalError: a splice did not happen, so that its answer would be that of a re-prefill.
        """
        tail = prompt.repair_tail if arm.endswith("+erratum") else prompt.tail
        if arm == "full+erratum":
            return Answer(self.reference([*prompt.source, *tail]))
        mode = Mode(arm.partition("+")[0])
        directives = [directive.model_copy(update={"mode": mode}) for directive in prompt.directives]
        try:
            return self._spliced(prompt, directives, tail, mode)
        except TransportError as error:
            raise ServerDown(f"no answer from {self._http.base_url}: {error}") from error
        except LeylineError as error:
            raise EvalError(str(error)) from error

    def _spliced(self, prompt: Prompt, directives: list[Directive], tail: Sequence[int], mode: Mode) -> Answer:
        salt = secrets.token_hex(16)
        first = self.client.splice(SpliceRequest(append=tuple(prompt.source), sampling_params=_GREEDY, cache_salt=salt))
        try:
            end = len(prompt.source)
            if first.output_ids:
                # What was generated is no part of the case. It has no KV yet, so taking it out costs nothing.
                directives = [*directives, Directive(start=end, end=end + len(first.output_ids), mode=mode)]
            reply = self.client.splice(
                SpliceRequest(
                    session=first.session,
                    directives=tuple(directives),
                    append=tuple(tail),
                    sampling_params=_GREEDY,
                    return_logprob=True,
                    top_logprobs_num=self._top,
                    cache_salt=salt,
                    keep_source=True,
                )
            )
        finally:
            self.client.delete_session(first.session, cache_salt=salt)
        if reply.receipt.reason is not None:
            raise EvalError(f"asked for {mode}, the server did {reply.receipt.executed}: {reply.receipt.reason}")
        return Answer(from_meta(reply.meta), reply.receipt.prefilled_tokens)
