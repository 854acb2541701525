"""`AsyncLeylineSession`: `LeylineSession` for asyncio. Only the waiting differs."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

import httpx

from . import _calls
from ._arguments import CONVERSATION_HEADER, ChatRequest, read_arguments
from ._client import AsyncLeylineClient
from ._completions import AsyncChatNamespace
from ._conversation import Conversation
from ._core import SessionCore, SessionOptions
from ._errors import LeylineError, TooManySessions, TransportError
from ._http import DEFAULT_TIMEOUT, Timeout
from ._models import Edit, TurnInfo
from ._tracked import AsyncSessionStream, Tracker
from ._turn import Answer, Command, FetchCounter, Sleep
from ._wire import ServerInfo

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.resources.chat import AsyncChat


class AsyncLeylineSession(SessionCore):
    """`LeylineSession` for asyncio: the same arguments, properties and errors; what talks to the server is awaited.

    ::

        session = AsyncLeylineSession("http://127.0.0.1:30000", policies=["truncate-older-than-n"])
        reply = await session.chat.completions.create(model="default", messages=history, tools=tools)

    Turns of one conversation wait for each other; turns of different ones run side by side. Use one session per event
    loop.
    """

    def __init__(
        self,
        base_url: str | httpx.URL,
        *,
        api_key: str | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
        transport: httpx.AsyncBaseTransport | None = None,
        http_client: httpx.AsyncClient | None = None,
        **options: Unpack[SessionOptions],
    ) -> None:
        super().__init__(asyncio.Lock, **options)
        self.client = AsyncLeylineClient(
            base_url, api_key=api_key, timeout=timeout, transport=transport, http_client=http_client
        )
        """The bare protocol, for what a session does not do itself."""
        self._openai: AsyncOpenAI | None = None

    @property
    def chat(self) -> AsyncChat:
        """``chat.completions.create``, with OpenAI's arguments and types."""
        return _chat(self, None)

    @property
    def openai(self) -> AsyncOpenAI:
        """A genuine ``openai.AsyncOpenAI`` client whose chat requests are turns of this session: for frameworks.

        Refusals reach it as the HTTP errors they are, so its own exceptions are raised. Raises `ConfigurationError`
        where the openai package is not installed.
        """
        if self._openai is None:
            from ._openai_client import async_openai_client

            self._openai = async_openai_client(self)
        return self._openai

    def conversation(self, key: str) -> AsyncSessionConversation:
        """The conversation of that name: its turns are not guessed from their history."""
        return AsyncSessionConversation(self, key)

    async def info(self) -> ServerInfo:
        """What the server is and can do."""
        return await self.client.info()

    async def undo(self) -> TurnInfo:
        """Take back the last edit of the conversation used last. See `AsyncSessionConversation.undo`."""
        return await self._operate(self._current(None), undo=True)

    async def purge(self) -> TurnInfo:
        """Drop all evicted influence from the conversation used last. See `AsyncSessionConversation.purge`."""
        return await self._operate(self._current(None), undo=False)

    async def aclose(self) -> None:
        """End the server's sessions, as far as it can be reached, and close the connections."""
        await self._end(self._conversations.all())
        if self._openai is not None:
            await self._openai.close()
        await self.client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def take_turn(
        self, arguments: Mapping[str, Any], key: str | None = None
    ) -> dict[str, Any] | AsyncSessionStream:
        """``create`` on plain data: its keyword arguments in; the reply as a dict, or the stream of its chunks, out.

        The dict's ``leyline`` is a `TurnResult`.
        """
        request = read_arguments(arguments, key)
        conversation, surplus = self._reserve(request)
        try:
            await self._end(surplus)
            async with conversation.lock:
                return await self._locked_turn(request, conversation)
        finally:
            self._conversations.release(conversation)

    async def _locked_turn(
        self, request: ChatRequest, conversation: Conversation
    ) -> dict[str, Any] | AsyncSessionStream:
        if conversation.stream is not None:
            await conversation.stream.overtake()
        answer = await self._answer(request, conversation)
        if request.stream:
            stream = AsyncSessionStream(answer.reply, Tracker(conversation, answer, self._complete))
            conversation.stream = stream
            return stream
        data = _calls.json_object(answer.reply)
        return {**data, "leyline": self._complete(conversation, answer, data)}

    async def _answer(self, request: ChatRequest, conversation: Conversation) -> Answer:
        while True:
            try:
                answer: Answer = await self._drive(self._engine.take_turn(request, conversation))
                return answer
            except TooManySessions:
                idle = self._conversations.oldest_idle()
                if idle is None:
                    raise
                await self._end([idle])

    async def _drive(self, steps: Generator[Command, Any, Any]) -> Any:
        try:
            command = next(steps)
            while True:
                try:
                    result = await self._carry_out(command)
                except BaseException as error:
                    command = steps.throw(error)
                else:
                    command = steps.send(result)
        except StopIteration as stop:
            return stop.value

    async def _carry_out(self, command: Command) -> Any:
        if isinstance(command, Sleep):
            await asyncio.sleep(command.seconds)
            return None
        if isinstance(command, FetchCounter):
            return await self.client.token_counter()
        return await (self.client._open(command) if command.stream else self.client._send(command))

    async def _operate(self, conversation: Conversation, undo: bool) -> TurnInfo:
        async with conversation.lock:
            return await self._drive(self._engine.operate(conversation, undo))  # type: ignore[no-any-return]

    async def _end(self, conversations: Sequence[Conversation]) -> None:
        for conversation in conversations:
            self._conversations.drop(conversation)
            call = self._delete_call(conversation)
            try:
                if call is not None:
                    await self.client._send(call.request)
            except TransportError:
                # Whoever cannot be reached cannot be tidied up either; the server's TTL does it.
                return
            except LeylineError:
                continue


class AsyncSessionConversation:
    """One named conversation of a session."""

    def __init__(self, session: AsyncLeylineSession, key: str) -> None:
        self._session, self.key = session, key

    @property
    def chat(self) -> AsyncChat:
        """``chat.completions.create`` for this conversation."""
        return _chat(self._session, self.key)

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The standing edits, in the coordinates of the last history that was sent."""
        return self._session._conversations.named(self.key).edits

    async def undo(self) -> TurnInfo:
        """Make the view before the last edit current again; policies that plan the same edits are not followed.

        Raises `NothingToUndo` where the server holds no earlier view.
        """
        return await self._session._operate(self._session._current(self.key), undo=True)

    async def purge(self) -> TurnInfo:
        """Drop everything that carries the influence of evicted text."""
        return await self._session._operate(self._session._current(self.key), undo=False)

    async def aclose(self) -> None:
        """End the conversation here and on the server."""
        await self._session._end([self._session._conversations.named(self.key)])


def _chat(session: AsyncLeylineSession, key: str | None) -> AsyncChat:
    def genuine() -> Any:
        headers = {} if key is None else {CONVERSATION_HEADER: key}
        return session.openai.with_options(default_headers=headers).chat

    namespace = AsyncChatNamespace(lambda arguments: session.take_turn(arguments, key), genuine)
    return cast("AsyncChat", namespace)
