"""What the token-level and session routes do: one `Service` per server, in the HTTP process."""

from __future__ import annotations

import os
from typing import Any

from leyline_client._errors import InvalidRequest, Overloaded
from leyline_client._models import TurnInfo
from leyline_client._wire import PlanReply, ServerInfo, SessionView, SpliceReply, SpliceRequest

from . import compat, shared
from .chats import ChatTurn, read_chat, rendered_prompt, reply_with_turn
from .engine import Engine
from .facts import Facts
from .metrics import Metrics
from .orders import Sealer
from .purge import purge_order, undo_order
from .rates import Rates
from .receipts import Outcome, drop_receipt
from .serving import serving_chat
from .sessions import Session, Sessions
from .streaming import TurnStream
from .turns import Turn
from .validation import parse
from .vocabulary import Vocabularies


class Service:
    """Sessions, planning and the engine, behind the routes.

    Args:
        engine: how prompts reach SGLang.
        serving: SGLang's chat handler, with turns slipped in (see `serving`).
        sessions: the open sessions.
        facts: what is known of the server.
        metrics: told of every turn.
    """

    def __init__(self, engine: Engine, serving: Any, sessions: Sessions, facts: Facts, metrics: Metrics) -> None:
        self.engine, self.serving, self.sessions, self.facts, self.metrics = engine, serving, sessions, facts, metrics
        self.rates = Rates()
        self.vocabularies = Vocabularies(engine.manager.tokenizer)

    @classmethod
    def of_running_server(cls) -> Service:
        """The service of the server this process runs."""
        manager, templates, _ = compat.http_state()
        engine = Engine(manager, Sealer(shared.key()))
        sessions = Sessions(
            limit=int(os.environ.get("LEYLINE_MAX_SESSIONS", "1024")),
            ttl=float(os.environ.get("LEYLINE_SESSION_TTL", "3600")),
            dp_size=compat.argument(manager.server_args, "dp_size"),
        )
        metrics = Metrics(enabled=manager.server_args.enable_metrics, model=manager.served_model_name)
        return cls(engine, serving_chat(engine, templates), sessions, Facts(manager), metrics)

    def info(self) -> ServerInfo:
        """``GET info``."""
        return self.facts.info(self.sessions)

    # --- turns ----------------------------------------------------------------------------------------------------

    async def splice(self, wanted: SpliceRequest, request: Any) -> SpliceReply:
        """``POST splice``."""
        session, made = self._session(wanted.session, wanted.cache_salt)
        turn = self._turn(session, keep_source=wanted.keep_source, purge=wanted.purge)
        try:
            async with session.lock:
                session.expect(wanted.expected_version)
                turn.plan_directives(wanted.directives, wanted.append)
                assert turn.plan is not None
                self._check_length(len(turn.plan.target))
                generate = compat.openai().GenerateReqInput(
                    input_ids=turn.plan.target.tolist(),
                    sampling_params=_sampling(wanted.sampling_params),
                    return_logprob=wanted.return_logprob,
                    top_logprobs_num=wanted.top_logprobs_num,
                    stream=False,
                )
                item = await self._generate(turn, generate, request)
                info = self._finish(turn)
        except BaseException:
            turn.abandon()
            if made:
                self.sessions.delete(session)
            raise
        meta = {k: v for k, v in item["meta_info"].items() if "logprobs" in k}
        reason = item["meta_info"].get("finish_reason") or {}
        return SpliceReply(
            **dict(info),
            output_ids=turn.outcome.output_ids,
            text=item.get("text") or "",
            finish_reason=reason.get("type"),
            meta=meta,
        )

    async def _generate(self, turn: Turn, generate: Any, request: Any) -> dict[str, Any]:
        last: Any = None
        try:
            await turn.prepare(self.engine, generate)
            async for item in self.engine.recorded(generate, request, turn.outcome):
                last = item
        except (ValueError, TypeError) as error:
            # SGLang checks sampling parameters by making an object of them.
            raise InvalidRequest(str(error), param="sampling_params") from None
        reason = (last or {}).get("meta_info", {}).get("finish_reason") or {}
        if last is None or reason.get("type") == "abort":
            raise Overloaded(reason.get("message") or "the engine aborted the request")
        result: dict[str, Any] = last
        return result

    def _check_length(self, prompt: int) -> None:
        limit = self.engine.manager.model_config.context_len
        if prompt == 0:
            raise InvalidRequest("the prompt is empty", param="append")
        if prompt >= limit:
            raise InvalidRequest(f"the prompt has {prompt} tokens, the context {limit}", param="append")

    async def chat(self, body: dict[str, Any], request: Any) -> Any:
        """``POST chat/completions``: the engine's reply plus ``leyline``."""
        chat, made = self._chat(body)
        turn, session = chat.turn, chat.turn.session
        await session.lock.acquire()
        streaming = False
        try:
            session.expect(chat.options.expected_version)
            response = await self.serving.handle_request(chat.request, request)
            if chat.error is not None:
                raise chat.error
            if hasattr(response, "body_iterator"):
                streaming = True
                return TurnStream(response, lambda: self._finish(turn), lambda: self._release(turn, made))
            return reply_with_turn(response, lambda: self._finish(turn))
        finally:
            if not streaming:
                self._release(turn, made)

    def _release(self, turn: Turn, made: bool) -> None:
        turn.abandon()
        turn.session.lock.release()
        if made and turn.info is None:
            self.sessions.delete(turn.session)

    def _chat(self, body: dict[str, Any]) -> tuple[ChatTurn, bool]:
        options, messages, request, salt = read_chat(body)
        session, made = self._session(options.session, salt)
        turn = self._turn(session, keep_source=options.keep_source, purge=options.purge)
        turn.edits, turn.directives = options.edits, options.directives
        return ChatTurn(turn, self.engine, messages, options, request, self.rates), made

    def _finish(self, turn: Turn) -> TurnInfo:
        info = turn.finish(self.sessions.clock())
        self.rates.learn(info.receipt, turn.outcome)
        self.metrics.turn(info.receipt, self.sessions)
        return info

    async def plan(self, body: dict[str, Any]) -> PlanReply:
        """``POST plan``: predict, change nothing."""
        if "messages" in body:
            chat, made = self._chat(body)
            turn = chat.turn
            try:
                rendered_prompt(self.serving, chat.request)
            except ValueError as error:
                raise chat.error or InvalidRequest(str(error), param="messages") from None
        else:
            wanted = parse(SpliceRequest, body)
            session, made = self._session(wanted.session, wanted.cache_salt)
            turn = self._turn(session, keep_source=wanted.keep_source, purge=wanted.purge)
            turn.plan_directives(wanted.directives, wanted.append)
        if made:
            self.sessions.delete(turn.session)
        return self.rates.predict(turn)

    # --- sessions -------------------------------------------------------------------------------------------------

    def _session(self, session_id: str | None, cache_salt: str | None) -> tuple[Session, bool]:
        if session_id is None:
            return self.sessions.create(cache_salt), True
        return self.sessions.get(session_id, cache_salt), False

    def _turn(self, session: Session, *, keep_source: bool, purge: bool) -> Turn:
        return Turn(session, self.facts.for_planner(), keep_source=keep_source, purge=purge)

    def view(self, session: Session) -> SessionView:
        """``GET sessions/{id}``."""
        view = session.memory.view
        return SessionView(
            session=session.id,
            version=session.version,
            tokens=len(view.ids),
            lineage=len(view.lineage.entries),
            influenced_tokens=0 if view.lineage.first is None else max(0, len(view.ids) - view.lineage.first),
            undoable=bool(session.earlier),
            idle_s=max(0.0, self.sessions.clock() - session.used_at),
        )

    async def delete(self, session: Session) -> None:
        """``DELETE sessions/{id}``: what only this session holds (its spliced KV) is dropped from the cache."""
        async with session.lock:
            order = purge_order(session)
            if order.forget:
                await self.engine.carry(session, order)
            self.sessions.delete(session)
        self.metrics.sessions(self.sessions)

    async def undo(self, session: Session, expected_version: int | None) -> TurnInfo:
        """``POST sessions/{id}/undo``: the earlier view, still cached; the spliced one goes."""
        async with session.lock:
            session.expect(expected_version)
            now = self.sessions.clock()
            order = undo_order(session.memory.view, session.undone(now, self.sessions.ttl).view)
            outcome = await self.engine.carry(session, order) if order.forget else Outcome()
            session.undo(now, self.sessions.ttl)
            return TurnInfo(session=session.id, version=session.version, receipt=drop_receipt(outcome))

    async def purge(self, session: Session, expected_version: int | None) -> TurnInfo:
        """``POST sessions/{id}/purge``: drop every node that carries, or still holds, text evicted by amortize."""
        async with session.lock:
            session.expect(expected_version)
            order = purge_order(session)
            outcome = await self.engine.carry(session, order) if order.forget else Outcome()
            session.purged(all_gone=not outcome.report.get("kept"), now=self.sessions.clock())
            return TurnInfo(session=session.id, version=session.version, receipt=drop_receipt(outcome))


def _sampling(params: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters for the engine: greedy, one token unless told; what Leyline uses itself cannot be set."""
    allowed = {k: v for k, v in params.items() if k not in ("custom_params", "n")}
    return {"temperature": 0.0, "max_new_tokens": 1, **allowed}
