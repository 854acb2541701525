"""A Froggy-style agent whose prompt only ever grows."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

from leyline_evals.gym import _debug_gym as dg
from leyline_evals.gym.env import QuietLogger
from leyline_evals.gym.llm import UNPARSABLE, LeylineLLM
from leyline_evals.gym.prompt import SYSTEM_PROMPT, instance_prompt

StepSink = Callable[[dict[str, Any]], None]


class LeylineAgent(dg.FroggyAgent):
    """debug-gym's loop with a static system prompt and a byte-faithful history.

    Differences from Froggy: the system prompt does not embed the latest evaluation; the history is what was sent and
    received, not rebuilt from parsed pieces; a turn without a tool call is answered by a user message, since a tool
    message would answer no call; ``max_steps`` steps are really taken (upstream stops one short). Trimming options of
    the base class are not supported: leaving things out is the policies' job.

    Args:
        llm: Where turns come from.
        max_steps: Most turns of one run.
        on_step: Called after every turn with its measurements: numbers, names and the receipt, no prompt text.
    """

    name = "leyline_agent"

    def __init__(self, llm: LeylineLLM, max_steps: int, on_step: StepSink) -> None:
        super().__init__(agent_args={"max_steps": max_steps, "system_prompt": ""}, llm=llm, logger=QuietLogger())
        self.on_step = on_step
        self.messages: list[dict[str, Any]] = []
        self.turns = 0

    def init(self, info: Any) -> None:
        """Start the transcript."""
        self.turns = 0
        self.messages = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": instance_prompt(info.instructions)},
        ]

    def build_prompt(self, info: Any = None) -> list[dict[str, Any]]:  # noqa: ARG002 - upstream's signature
        """The messages of the next request: a copy of everything so far."""
        return copy.deepcopy(self.messages)

    def execute_action(self, llm_response: Any) -> Any:
        """Act in the environment, extend the transcript and report the turn."""
        started = time.perf_counter()
        call = llm_response.tool
        info = self.env.step(call, llm_response.response, llm_response.reasoning_response)
        env_ms = (time.perf_counter() - started) * 1000
        text = info.step_observation.observation
        if call.name == UNPARSABLE:
            text = f"The arguments of the call to {call.arguments['tool']} were not a JSON object. Nothing was done."
        self.messages.append(copy.deepcopy(llm_response.message))
        if llm_response.message.get("tool_calls"):
            answer = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
            answer["name"] = llm_response.message["tool_calls"][0]["function"]["name"]
        else:
            answer = {"role": "user", "content": text}
        self.messages.append(answer)
        self.on_step(self._measurements(call.name, info, env_ms))
        self.turns += 1
        return info

    def should_stop(self, step: int, info: Any) -> tuple[bool, str | None]:
        """Stop when the environment has ended or after ``max_steps`` turns (``step`` is the number of the next)."""
        if info.terminated:
            return True, "terminated"
        return (True, "max_steps") if step > self.args.max_steps else (False, None)

    def build_trajectory(self) -> dict[str, Any]:
        """How the run ended."""
        return {
            "resolved": bool(self.env.resolved),
            "score": int(self.env.score),
            "max_score": int(self.env.max_score or 0),
            "turns": self.turns,
            "ended": "terminated" if self.env.terminated else "max_steps",
        }

    def _measurements(self, tool: str, info: Any, env_ms: float) -> dict[str, Any]:
        reply = self.llm.last_reply
        usage = reply.body.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        leyline = reply.body.get("leyline") or {}
        return {
            "turn": self.turns,
            "tool": tool,
            "score": int(info.score),
            "attempts": self.llm.attempts,
            "prompt_tokens": usage.get("prompt_tokens"),
            "cached_tokens": details.get("cached_tokens"),
            "completion_tokens": usage.get("completion_tokens"),
            "ttft_ms": reply.ttft_ms,
            "total_ms": reply.total_ms,
            "env_ms": round(env_ms, 3),
            # The session id opens a session to whoever knows it; it stays out of files.
            "leyline": {key: value for key, value in leyline.items() if key != "session"} or None,
        }
