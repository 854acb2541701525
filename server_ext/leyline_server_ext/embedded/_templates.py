"""The chat template shared by the embedded models."""

import hashlib
from importlib.resources import files

TOOL_CALL_PARSER = "hermes"
"""SGLang's parser for the notation the template uses."""


def chat_template(default_system: str = "") -> str:
    """ChatML with tools; `default_system` is used when the first message is not a system message."""
    text = files(__package__).joinpath("chatml_tools.jinja").read_text(encoding="utf-8")
    return text.replace("@DEFAULT_SYSTEM@", default_system)


def chat_template_digest() -> str:
    """Eight digits that change with the template, for the names of models that were made with it."""
    return hashlib.sha256(chat_template().encode()).hexdigest()[:8]
