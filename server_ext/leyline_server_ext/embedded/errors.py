"""What can go wrong around the embedded server.

::

    EmbeddedError
    ├── ModelError          a model cannot be found, made or converted
    ├── PortTakenError      something else listens on the port
    ├── MemoryShortError    less memory available than the server is going to need
    ├── ServerDiedError     the process ended before or while it was needed; carries the end of its log
    └── StartTimeoutError   the server did not answer in time; carries the end of its log
"""


class EmbeddedError(RuntimeError):
    """Base of all embedded-server errors."""


class ModelError(EmbeddedError):
    """A model name is unknown, its package cannot be fetched, or its files are not usable."""


class PortTakenError(EmbeddedError):
    """The asked-for port is in use."""


class MemoryShortError(EmbeddedError):
    """The estimate of what the server needs exceeds the memory available now."""


class ServerDiedError(EmbeddedError):
    """The server process ended. `log_tail` holds the last lines of its log."""

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(f"{message}\n{log_tail}" if log_tail else message)
        self.log_tail = log_tail


class StartTimeoutError(ServerDiedError):
    """The server was not healthy within the time allowed."""
