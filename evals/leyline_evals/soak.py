"""``make soak``: thousands of edits over many sessions under pool pressure, with clients that go away.

What is checked, on a tiny model in fp32 on the embedded server:

- after the last edit, and after ending every session, no slot is missing (``leaked_slots``);
- in watched sessions every answer's logits equal those of a transformers oracle that does to its own KV what the
  receipts say happened (``wrong_values``);
- reuse does not decay: the first and the last thousand edits reuse the same share of their prompts (of those that
  amortize: what a forget leaves cached depends on where it happens to begin).
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from leyline_client._models import Directive, apply_directives
from leyline_evals.mirror import Mirror

SPLICE = "/leyline/v1/splice"
SCRIPTS = 12
"""A conversation's lengths, cuts and modes come from one of so many scripts per walker, in turn: about as many as a
thousand edits take. So the first and the last thousand do the same things, to other text."""
_TOLERANCE = 2e-3
"""Largest difference of log-probabilities from the oracle's: fp32 on both sides, other summation orders."""


@dataclass
class Tally:
    """Counts of one run; guarded by ``lock``."""

    wanted: int
    edits: int = 0
    aborts: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    compared: int = 0
    wrong: int = 0
    worst: float = 0.0
    reuse: list[tuple[int, int]] = field(default_factory=list)
    """Per edit that amortizes: cached and prompt tokens."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def edited(self, receipt: dict[str, Any], *, forgets: bool) -> None:
        """An edit was answered."""
        with self.lock:
            self.edits += 1
            if not forgets:
                self.reuse.append((receipt["cached_tokens"], receipt["prompt_tokens"]))
            if receipt["reason"]:
                self.reasons[receipt["reason"]] = self.reasons.get(receipt["reason"], 0) + 1

    def failed(self, code: str) -> None:
        """A request was refused."""
        with self.lock:
            self.errors[code] = self.errors.get(code, 0) + 1

    def checked(self, error: float) -> None:
        """An answer was compared with the oracle."""
        with self.lock:
            self.compared += 1
            self.wrong += error > _TOLERANCE
            self.worst = max(self.worst, error)

    @property
    def done(self) -> bool:
        """Whether enough edits were made."""
        return self.edits >= self.wanted


class Walker:
    """Lives through sessions one after another: a prompt, random edits, the end."""

    def __init__(self, url: str, seed: int, tally: Tally, mirror: Mirror | None) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)
        self._seed, self._text, self._random = seed, random.Random(seed), random.Random()
        self._tally, self._mirror = tally, mirror
        self.sessions = 0

    def run(self) -> None:
        """Until the tally is full."""
        with self._http:
            while not self._tally.done:
                self._live()

    def _tokens(self, low: int, high: int) -> list[int]:
        return self._text.choices(range(3, 250), k=self._random.randint(low, high))

    def _live(self) -> None:
        state: dict[str, Any] = {"session": None, "ids": []}
        self._random = random.Random(f"{self._seed} {self.sessions % SCRIPTS}")
        self.sessions += 1
        if self._mirror:
            self._mirror.reset()
        self._turn(state, [], self._tokens(150, 500))
        for _ in range(self._random.randint(4, 25)):
            if self._tally.done or state["session"] is None:
                break
            if self._mirror is None and self._random.random() < 0.1:
                self._abort(state)
                continue
            self._turn(state, self._edits(len(state["ids"])), self._tokens(1, 60))
        if state["session"] is not None:
            self._http.delete(f"/leyline/v1/sessions/{state['session']}")

    def _edits(self, length: int) -> list[dict[str, Any]]:
        # Edits may have left of a session only a few tokens.
        spans = min(self._random.randint(1, 3), length // 2)
        cuts = sorted(self._random.sample(range(length), k=2 * spans))
        pairs = [(a, min(b, a + 120)) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
        mode = "forget" if self._random.random() < 0.1 else "amortize"
        return [
            {
                "start": a,
                "end": b,
                "replacement": self._tokens(1, 8) if self._random.random() < 0.3 else [],
                "mode": mode,
            }
            for a, b in pairs
        ]

    def _turn(self, state: dict[str, Any], directives: list[dict[str, Any]], append: list[int]) -> None:
        body = {
            "session": state["session"],
            "directives": directives,
            "append": append,
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": 3,
        }
        reply = self._http.post(SPLICE, json=body)
        if reply.status_code != 200:
            self._tally.failed(reply.json()["error"]["code"])
            state["session"] = None
            return
        answer = reply.json()
        if directives:
            self._tally.edited(answer["receipt"], forgets=directives[0]["mode"] == "forget")
        target = [*apply_directives(state["ids"], [Directive(**one) for one in directives]), *append]
        if self._mirror:
            error = self._mirror.follow(state["ids"], target, answer)
            if error is not None:
                self._tally.checked(error)
        state["session"], state["ids"] = answer["session"], target + answer["output_ids"]

    def _abort(self, state: dict[str, Any]) -> None:
        """Ask for a long answer and go away at a random moment. The session stays where it was."""
        body = {
            "session": state["session"],
            "directives": self._edits(len(state["ids"])),
            "append": self._tokens(1, 60),
            "sampling_params": {"max_new_tokens": 64, "ignore_eos": True},
        }
        patience = self._random.choice([0.002, 0.01, 0.05, 0.2])
        try:
            self._http.post(SPLICE, json=body, timeout=httpx.Timeout(120, read=patience))
        except httpx.TimeoutException:
            with self._tally.lock:
                self._tally.aborts += 1
        # Whether the turn was finished before we left decides where the session stands; ask.
        view = self._http.get(f"/leyline/v1/sessions/{state['session']}")
        if view.status_code != 200 or view.json()["tokens"] != len(state["ids"]):
            self._http.delete(f"/leyline/v1/sessions/{state['session']}")
            state["session"] = None


def pool_counts(http: httpx.Client) -> dict[str, int]:
    """Pool counts when idle."""
    deadline = time.monotonic() + 30
    while True:
        reply = http.post(SPLICE, json={"append": [1], "sampling_params": {"max_new_tokens": 1}}).json()
        http.delete(f"/leyline/v1/sessions/{reply['session']}")
        pool: dict[str, int] = reply["receipt"]["pool_before"]
        if pool["held"] == 0 or time.monotonic() > deadline:
            return pool
        time.sleep(0.5)


def run(url: str, model_folder: Path, *, edits: int, walkers: int, watched: int, seed: int) -> dict[str, Any]:
    """Soak the server at ``url`` and return what is written to ``out/soak.json``."""
    tally = Tally(edits)
    page = int(httpx.get(f"{url}/leyline/v1/info").raise_for_status().json()["page_size"])
    crew = [
        Walker(url, seed * 1000 + number, tally, Mirror(model_folder, page) if number < watched else None)
        for number in range(walkers)
    ]
    started = time.monotonic()
    stop = threading.Event()
    reporter = threading.Thread(target=_progress, args=(tally, stop), daemon=True)
    reporter.start()
    try:
        with ThreadPoolExecutor(walkers) as executor:
            for future in [executor.submit(walker.run) for walker in crew]:
                future.result()
    finally:
        stop.set()
    with httpx.Client(base_url=url, timeout=60) as http:
        idle = pool_counts(http)
        http.post("/flush_cache").raise_for_status()
        empty = pool_counts(http)
    thousand = min(1000, max(1, len(tally.reuse) // 2))
    return {
        "edits": tally.edits,
        "sessions": sum(walker.sessions for walker in crew),
        "aborts": tally.aborts,
        "leaked_slots": idle["held"] + empty["total"] - empty["free"] - empty["cached"],
        "compared_values": tally.compared,
        "wrong_values": tally.wrong,
        "worst_logprob_error": tally.worst,
        "reuse_first": _share(tally.reuse[:thousand]),
        "reuse_last": _share(tally.reuse[-thousand:]),
        "reasons": tally.reasons,
        "errors": tally.errors,
        "pool": idle["total"],
        "seconds": round(time.monotonic() - started, 1),
    }


def _share(pairs: list[tuple[int, int]]) -> float:
    return round(sum(cached for cached, _ in pairs) / max(1, sum(prompt for _, prompt in pairs)), 4)


def _progress(tally: Tally, stop: threading.Event) -> None:
    while not stop.wait(10):
        edits = f"{tally.edits}/{tally.wanted} edits, {tally.aborts} aborts"
        print(f"  {edits}, {tally.compared} compared, {tally.wrong} wrong", flush=True)


def main() -> int:
    """Command line of ``make soak``. Exit code 1 if anything leaked or was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=10_000, help="edits to make (default 10,000)")
    parser.add_argument("--walkers", type=int, default=8, help="conversations at a time (default 8)")
    parser.add_argument("--watched", type=int, default=2, help="of these, compared with the oracle (default 2)")
    parser.add_argument("--model", default="tiny-gqa", choices=["tiny-gqa", "tiny-mla"], help="default tiny-gqa")
    parser.add_argument(
        "--pool", type=int, default=3_000, help="KV pool in tokens, small enough to evict (default 3,000)"
    )
    parser.add_argument("--page-size", type=int, default=1, help="tokens per page of the pool (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/soak.json"))
    options = parser.parse_args()
    from leyline_server_ext.embedded import EmbeddedServer
    from leyline_server_ext.embedded.models import ensure_model

    with EmbeddedServer(
        options.model,
        dtype="float32",
        max_total_tokens=options.pool,
        extra_args=["--page-size", str(options.page_size)],
        progress=print,
    ) as server:
        result = run(
            server.base_url,
            ensure_model(options.model),
            edits=options.edits,
            walkers=options.walkers,
            watched=options.watched,
            seed=options.seed,
        )
    result = {"model": options.model, "page_size": options.page_size, **result}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    bad = result["leaked_slots"] or result["wrong_values"] or not result["compared_values"]
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
