"""The paper's load: sessions sharing a system prompt, turns of tool output, an eviction a turn; and who serves it."""

from __future__ import annotations

import queue
import random
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from leyline_client import Directive, LeylineClient, LeylineError, Mode, Reason, SpliceRequest, TransportError
from leyline_client._models import apply_directives
from leyline_evals.common import EvalError, ServerDown

STOCK = "stock radix"
ARMS = (STOCK, "leyline+forget", "leyline+amortize")


@dataclass(frozen=True)
class Workload:
    """Sizes are tokens. The defaults suit two CPU cores; `PAPER` is what the paper ran on one H100."""

    sessions: int = 16
    turns: int = 4
    system_tokens: int = 256
    turn_tokens: int = 128
    keep_tokens: int = 16
    """Of an evicted output, at its head."""
    stub_tokens: int = 8
    age: int = 2
    """An output is evicted when this many newer ones are there: from turn ``age`` on, one eviction a turn."""
    new_tokens: int = 4
    """Generated per request, and dropped before the next turn."""

    def longest(self) -> int:
        """Tokens of the longest prompt."""
        whole = min(self.turns, self.age)
        short = self.turns - whole
        return self.system_tokens + whole * self.turn_tokens + short * (self.keep_tokens + self.stub_tokens)


PAPER = Workload(sessions=16, turns=6, system_tokens=4096, turn_tokens=2048, keep_tokens=64)


@dataclass(frozen=True)
class Served:
    """One request: its time in milliseconds and what was cached of its prompt."""

    milliseconds: float
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int


class Turns(Protocol):
    """How an arm serves a session."""

    def turn(self, edits: Sequence[Directive], append: Sequence[int], new_tokens: int) -> Served:
        """Serve the next turn: ``edits`` in the coordinates of the prompt so far, then ``append``."""

    def close(self) -> None:
        """End the session."""


@dataclass
class Plain:
    """SGLang's own ``/generate``: the edited prompt is sent whole and the radix cache finds what it finds."""

    http: httpx.Client
    salt: str
    prompt: list[int] = field(default_factory=list)

    def turn(self, edits: Sequence[Directive], append: Sequence[int], new_tokens: int) -> Served:
        """See `Turns`."""
        self.prompt = [*apply_directives(self.prompt, list(edits)), *append]
        body = {"input_ids": self.prompt, "sampling_params": sampling(new_tokens), "cache_salt": self.salt}
        began = time.perf_counter()
        try:
            reply = self.http.post("/generate", json=body)
        except httpx.TransportError as error:
            raise ServerDown(f"no answer from {self.http.base_url}: {error}") from error
        elapsed = (time.perf_counter() - began) * 1000
        if reply.status_code != httpx.codes.OK:
            raise EvalError(f"/generate answered {reply.status_code}: {reply.text[:200]}")
        meta = reply.json()["meta_info"]
        prompt, cached = int(meta["prompt_tokens"]), int(meta["cached_tokens"])
        return Served(elapsed, prompt, cached, prompt - cached)

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class Spliced:
    """Leyline's token route, in one mode."""

    client: LeylineClient
    salt: str
    mode: Mode
    length: int = 0
    generated: int = 0
    session: str | None = None

    def turn(self, edits: Sequence[Directive], append: Sequence[int], new_tokens: int) -> Served:
        """See `Turns`. What was generated last is taken out, so that all arms serve the same prompts."""
        directives = [edit.model_copy(update={"mode": self.mode}) for edit in edits]
        if self.generated:
            # Mode amortize: a forget here would say nothing, since nothing lies behind it.
            directives.append(Directive(start=self.length, end=self.length + self.generated))
        request = SpliceRequest(
            session=self.session,
            directives=tuple(directives),
            append=tuple(append),
            sampling_params=sampling(new_tokens),
            cache_salt=self.salt,
        )
        began = time.perf_counter()
        try:
            reply = self.client.splice(request)
        except TransportError as error:
            raise ServerDown(f"no answer from {self.client.base_url}: {error}") from error
        except LeylineError as error:
            raise EvalError(str(error)) from error
        elapsed = (time.perf_counter() - began) * 1000
        self.session = reply.session
        receipt = reply.receipt
        if receipt.reason not in (None, Reason.NEW_SESSION, Reason.SOURCE_NOT_CACHED, Reason.SOURCE_PARTIALLY_CACHED):
            raise EvalError(f"{self.mode}: the server did {receipt.executed}: {receipt.reason}")
        self.length, self.generated = receipt.prompt_tokens, len(reply.output_ids)
        return Served(elapsed, receipt.prompt_tokens, receipt.cached_tokens, receipt.prefilled_tokens)

    def close(self) -> None:
        """Release what only this session holds."""
        if self.session is not None:
            try:
                self.client.delete_session(self.session, cache_salt=self.salt)
            except LeylineError:
                return


def sampling(new_tokens: int) -> dict[str, Any]:
    """Greedy, and always the same number of tokens."""
    return {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True}


class Tokens:
    """Random token ids of the middle of a vocabulary, where no special tokens are."""

    def __init__(self, vocab_size: int, seed: str) -> None:
        self._draw = random.Random(seed)
        self._ids = range(vocab_size // 8, vocab_size - vocab_size // 8)

    def take(self, count: int) -> list[int]:
        """``count`` ids."""
        return self._draw.choices(self._ids, k=count)


@dataclass
class Agent:
    """One session's side: what it sends turn by turn. The same seed sends the same in every arm."""

    workload: Workload
    turns: Turns
    tokens: Tokens
    system: list[int]
    stub: tuple[int, ...]
    done: int = 0
    outputs: list[tuple[int, int]] = field(default_factory=list)
    """Spans of the tool outputs in the prompt so far."""
    length: int = 0

    def step(self) -> Served:
        """One turn."""
        edits = self._evict()
        append = self.tokens.take(self.workload.turn_tokens)
        if not self.done:
            append = self.system + append
        served = self.turns.turn(edits, append, self.workload.new_tokens)
        self.outputs.append((self.length + len(append) - self.workload.turn_tokens, self.length + len(append)))
        self.length += len(append)
        self.done += 1
        if served.prompt_tokens != self.length:
            raise EvalError(f"the server counts {served.prompt_tokens} prompt tokens, {self.length} were sent")
        return served

    def _evict(self) -> list[Directive]:
        """The output that is ``age`` turns old keeps its head and a stub."""
        index = len(self.outputs) - self.workload.age
        if index < 0:
            return []
        start, end = self.outputs[index]
        edit = Directive(start=start + self.workload.keep_tokens, end=end, replacement=self.stub)
        moved = [(a + edit.delta, b + edit.delta) for a, b in self.outputs[index + 1 :]]
        self.outputs[index:] = [(start, end + edit.delta), *moved]
        self.length += edit.delta
        return [edit]


class Server:
    """Makes sessions of an arm on one server."""

    def __init__(self, base_url: str, vocab_size: int) -> None:
        limits = httpx.Limits(max_connections=None)
        self.client = LeylineClient(base_url)
        self.http = httpx.Client(base_url=base_url.rstrip("/"), timeout=None, trust_env=False, limits=limits)
        self.vocab_size = vocab_size

    def turns(self, arm: str, salt: str) -> Turns:
        """A session of ``arm``, under ``salt``."""
        if arm == STOCK:
            return Plain(self.http, salt)
        return Spliced(self.client, salt, Mode(arm.removeprefix("leyline+")))

    def agents(self, arm: str, workload: Workload) -> list[Agent]:
        """All sessions of a run. They share a cache namespace and the system prompt, as one user's agents would."""
        salt = secrets.token_hex(16)
        shared = Tokens(self.vocab_size, "system")
        system, stub = shared.take(workload.system_tokens), tuple(shared.take(workload.stub_tokens))
        return [
            Agent(workload, self.turns(arm, salt), Tokens(self.vocab_size, f"session {index}"), system, stub)
            for index in range(workload.sessions)
        ]

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
        self.http.close()


def run_load(agents: Sequence[Agent], concurrency: int) -> list[Served]:
    """Serve every turn of every session, ``concurrency`` at a time, the sessions taking turns.

    Raises:
        ServerDown, EvalError: of the first request that failed; the others are not started.
    """
    waiting: queue.SimpleQueue[Agent] = queue.SimpleQueue()
    for agent in agents:
        waiting.put(agent)
    served: list[Served] = []
    failed: list[Exception] = []
    total = sum(agent.workload.turns for agent in agents)

    def work() -> None:
        while len(served) < total and not failed:
            try:
                agent = waiting.get(timeout=0.2)
            except queue.Empty:
                continue
            try:
                served.append(agent.step())
            except Exception as error:
                failed.append(error)
                return
            if agent.done < agent.workload.turns:
                waiting.put(agent)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(concurrency, len(agents)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for agent in agents:
            agent.turns.close()
    if failed:
        raise failed[0]
    return served
