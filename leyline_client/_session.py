"""`LeylineSession`: in place of an OpenAI client, for any agent loop that keeps its full history."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, cast

import httpx

from . import _calls
from ._arguments import CONVERSATION_HEADER, ChatRequest, read_arguments
from ._client import LeylineClient
from ._completions import ChatNamespace
from ._conversation import Conversation
from ._core import SessionCore, SessionOptions
from ._errors import LeylineError, TooManySessions, TransportError
from ._http import DEFAULT_TIMEOUT, Timeout
from ._models import Edit, TurnInfo
from ._tracked import SessionStream, Tracker
from ._turn import Answer, Command, FetchCounter, Sleep
from ._wire import ServerInfo

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.resources.chat import Chat


class LeylineSession(SessionCore):
    """An OpenAI client's ``chat.completions.create`` whose turns are edited by policies and spliced by the server.

    ::

        session = LeylineSession("http://127.0.0.1:30000", policies=["truncate-older-than-n"])
        reply = session.chat.completions.create(model="default", messages=history, tools=tools)

    The agent keeps and sends its full, unedited history. Several conversations can run through one session: each is
    recognised by its history (a turn belongs to the conversation it extends), or named with `conversation` or the
    header ``x-leyline-conversation``. Safe under threads.

    Args:
        base_url: The server's root, or the ``…/v1`` an OpenAI client would be given.
        api_key: The key SGLang was started with.
        timeout: Of a turn, in seconds; by default 5 s to connect and no limit for reading.
        transport, http_client: As for `LeylineClient`.
        options: See `SessionOptions`.

    ``create`` raises `PolicyError` for a policy that raised or broke a rule (the server was not called),
    `ExtensionMissing`, `ServerError` for a typed refusal, `TransportError` after the last retry, `ConfigurationError`
    for arguments that cannot be sent.
    """

    def __init__(
        self,
        base_url: str | httpx.URL,
        *,
        api_key: str | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
        transport: httpx.BaseTransport | None = None,
        http_client: httpx.Client | None = None,
        **options: Unpack[SessionOptions],
    ) -> None:
        super().__init__(threading.Lock, **options)
        self.client = LeylineClient(
            base_url, api_key=api_key, timeout=timeout, transport=transport, http_client=http_client
        )
        """The bare protocol, for what a session does not do itself."""
        self._openai: OpenAI | None = None

    @property
    def chat(self) -> Chat:
        """``chat.completions.create``, with OpenAI's arguments and types."""
        return _chat(self, None)

    @property
    def openai(self) -> OpenAI:
        """A genuine ``openai.OpenAI`` client whose chat requests are turns of this session: for frameworks.

        Refusals reach it as the HTTP errors they are, so its own exceptions are raised. Raises `ConfigurationError`
        where the openai package is not installed.
        """
        if self._openai is None:
            from ._openai_client import openai_client

            self._openai = openai_client(self)
        return self._openai

    def conversation(self, key: str) -> SessionConversation:
        """The conversation of that name: its turns are not guessed from their history."""
        return SessionConversation(self, key)

    def info(self) -> ServerInfo:
        """What the server is and can do."""
        return self.client.info()

    def undo(self) -> TurnInfo:
        """Take back the last edit of the conversation used last. See `SessionConversation.undo`."""
        return self._operate(self._current(None), undo=True)

    def purge(self) -> TurnInfo:
        """Drop all evicted influence from the conversation used last. See `SessionConversation.purge`."""
        return self._operate(self._current(None), undo=False)

    def close(self) -> None:
        """End the server's sessions, as far as it can be reached, and close the connections."""
        self._end(self._conversations.all())
        if self._openai is not None:
            self._openai.close()
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def take_turn(self, arguments: Mapping[str, Any], key: str | None = None) -> dict[str, Any] | SessionStream:
        """``create`` on plain data: its keyword arguments in; the reply as a dict, or the stream of its chunks, out.

        The dict's ``leyline`` is a `TurnResult`.
        """
        request = read_arguments(arguments, key)
        conversation, surplus = self._reserve(request)
        try:
            self._end(surplus)
            with conversation.lock:
                return self._locked_turn(request, conversation)
        finally:
            self._conversations.release(conversation)

    def _locked_turn(self, request: ChatRequest, conversation: Conversation) -> dict[str, Any] | SessionStream:
        if conversation.stream is not None:
            conversation.stream.overtake()
        answer = self._answer(request, conversation)
        if request.stream:
            stream = SessionStream(answer.reply, Tracker(conversation, answer, self._complete))
            conversation.stream = stream
            return stream
        data = _calls.json_object(answer.reply)
        return {**data, "leyline": self._complete(conversation, answer, data)}

    def _answer(self, request: ChatRequest, conversation: Conversation) -> Answer:
        while True:
            try:
                answer: Answer = self._drive(self._engine.take_turn(request, conversation))
                return answer
            except TooManySessions:
                idle = self._conversations.oldest_idle()
                if idle is None:
                    raise
                self._end([idle])

    def _drive(self, steps: Generator[Command, Any, Any]) -> Any:
        try:
            command = next(steps)
            while True:
                try:
                    result = self._carry_out(command)
                except BaseException as error:
                    command = steps.throw(error)
                else:
                    command = steps.send(result)
        except StopIteration as stop:
            return stop.value

    def _carry_out(self, command: Command) -> Any:
        if isinstance(command, Sleep):
            time.sleep(command.seconds)
            return None
        if isinstance(command, FetchCounter):
            return self.client.token_counter()
        return self.client._open(command) if command.stream else self.client._send(command)

    def _operate(self, conversation: Conversation, undo: bool) -> TurnInfo:
        with conversation.lock:
            return self._drive(self._engine.operate(conversation, undo))  # type: ignore[no-any-return]

    def _end(self, conversations: Sequence[Conversation]) -> None:
        for conversation in conversations:
            self._conversations.drop(conversation)
            call = self._delete_call(conversation)
            try:
                if call is not None:
                    self.client._send(call.request)
            except TransportError:
                # Whoever cannot be reached cannot be tidied up either; the server's TTL does it.
                return
            except LeylineError:
                continue


class SessionConversation:
    """One named conversation of a session."""

    def __init__(self, session: LeylineSession, key: str) -> None:
        self._session, self.key = session, key

    @property
    def chat(self) -> Chat:
        """``chat.completions.create`` for this conversation."""
        return _chat(self._session, self.key)

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The standing edits, in the coordinates of the last history that was sent."""
        return self._session._conversations.named(self.key).edits

    def undo(self) -> TurnInfo:
        """Make the view before the last edit current again; policies that plan the same edits are not followed.

        Raises `NothingToUndo` where the server holds no earlier view.
        """
        return self._session._operate(self._session._current(self.key), undo=True)

    def purge(self) -> TurnInfo:
        """Drop everything that carries the influence of evicted text."""
        return self._session._operate(self._session._current(self.key), undo=False)

    def close(self) -> None:
        """End the conversation here and on the server."""
        self._session._end([self._session._conversations.named(self.key)])


def _chat(session: LeylineSession, key: str | None) -> Chat:
    def genuine() -> Any:
        headers = {} if key is None else {CONVERSATION_HEADER: key}
        return session.openai.with_options(default_headers=headers).chat

    namespace = ChatNamespace(lambda arguments: session.take_turn(arguments, key), genuine)
    return cast("Chat", namespace)
