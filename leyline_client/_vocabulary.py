"""Vocabularies fetched from servers, kept on disk under their digest, and the exact token counters made of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from functools import lru_cache
from pathlib import Path

from ._errors import ConfigurationError, ProtocolError, Unsupported
from ._wire import TokenizerInfo
from .policy import TokenCounter


def cache_folder() -> Path:
    """``tokenizers`` in ``$LEYLINE_CACHE``, else in ``$XDG_CACHE_HOME/leyline``, else in ``~/.cache/leyline``."""
    own = os.environ.get("LEYLINE_CACHE")
    root = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leyline"
    return root / "tokenizers"


def cached(wanted: TokenizerInfo) -> bytes | None:
    """The vocabulary, if it is on disk and is what its name says."""
    try:
        content = (cache_folder() / f"{wanted.digest}.json").read_bytes()
    except OSError:
        return None
    return content if hashlib.sha256(content).hexdigest() == wanted.digest else None


def keep(wanted: TokenizerInfo, content: bytes) -> None:
    """Write the vocabulary to disk, whole or not at all. A folder that cannot be written only costs the next fetch."""
    folder = cache_folder()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            Path(part).replace(folder / f"{wanted.digest}.json")
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise


def counter(content: bytes) -> TokenCounter:
    """The counter of a vocabulary, or the estimate where tiktoken is not installed.

    Raises:
        ProtocolError: the content is no vocabulary.
    """
    try:
        return _exact(content)
    except ConfigurationError as error:
        return estimate(error)


@lru_cache(maxsize=4)
def _exact(content: bytes) -> TokenCounter:
    """Made once per process: it takes a second of one core and more."""
    from .policy._bpe import counter_from_data

    try:
        return counter_from_data(json.loads(content), name="served model")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"the server's vocabulary cannot be read: {type(error).__name__}") from error


def estimate(refusal: Unsupported | ConfigurationError) -> TokenCounter:
    """The marked estimate that stands in where counts cannot be exact; its name says why."""
    return TokenCounter(name=f"estimate: {refusal}")
