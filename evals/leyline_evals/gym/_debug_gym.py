"""The parts of debug-gym that are used, imported without the rest.

``debug_gym``'s package ``__init__`` files import every environment, terminal and model client it knows, and with them
docker images, kubernetes, datasets, swebench, swesmith (and through it sglang) and transformers: over a gigabyte that
mini_nightmare on a local terminal never calls. Registering those packages without running their ``__init__`` leaves
their submodules importable one by one. ``debug_gym.constants`` creates folders in the user's home when imported, so
its two paths are given here without creating anything.

Everything else in this package imports debug-gym names from here only. Checked on debug-gym 1.3.0.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from leyline_evals.gym.tasks import DEBUG_GYM_VERSION

_SKIPPED_INITS = (
    "debug_gym.gym",
    "debug_gym.gym.envs",
    "debug_gym.gym.terminals",
    "debug_gym.llms",
    "debug_gym.agents",
)


class DebugGymMissingError(ImportError):
    """debug-gym is not installed, or is another release than the one checked."""


def _check_version() -> None:
    try:
        found = importlib.metadata.version("debug-gym")
    except importlib.metadata.PackageNotFoundError as error:
        raise DebugGymMissingError(
            "debug-gym is not installed here: install requirements/evals.txt with --no-deps into a Python 3.12"
        ) from error
    if found != DEBUG_GYM_VERSION:
        raise DebugGymMissingError(f"debug-gym {found} is installed, {DEBUG_GYM_VERSION} is needed")


def _register_without_init(name: str) -> None:
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise DebugGymMissingError(f"this debug-gym has no {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    setattr(importlib.import_module(parent), child, module)


def _constants_without_folders() -> None:
    name = "debug_gym.constants"
    if name in sys.modules:
        return
    module = ModuleType(name, "Paths only; nothing is created.")
    base = Path(tempfile.gettempdir()) / "debug-gym-unused"
    module.__dict__.update(DEBUG_GYM_CONFIG_DIR=base / "config", DEBUG_GYM_CACHE_DIR=base / "cache")
    sys.modules[name] = module


_check_version()
for _name in _SKIPPED_INITS:
    _register_without_init(_name)
_constants_without_folders()

from debug_gym.agents.froggy_agent import FroggyAgent  # noqa: E402
from debug_gym.gym.entities import EvalOutput, Observation  # noqa: E402
from debug_gym.gym.envs.env import EnvInfo  # noqa: E402
from debug_gym.gym.envs.mini_nightmare import MiniNightmareEnv  # noqa: E402
from debug_gym.gym.terminals.local import LocalTerminal  # noqa: E402
from debug_gym.gym.terminals.shell_session import ShellSession  # noqa: E402
from debug_gym.gym.tools import bash, edit, eval, grep, pdb, submit, view  # noqa: E402, F401
from debug_gym.gym.tools.tool import ToolCall  # noqa: E402
from debug_gym.gym.tools.toolbox import Toolbox  # noqa: E402
from debug_gym.gym.workspace import Workspace  # noqa: E402
from debug_gym.llms.base import LLMConfig, LLMResponse  # noqa: E402
from debug_gym.llms.openai import OpenAILLM  # noqa: E402

__all__ = [
    "EnvInfo",
    "EvalOutput",
    "FroggyAgent",
    "LLMConfig",
    "LLMResponse",
    "LocalTerminal",
    "MiniNightmareEnv",
    "Observation",
    "OpenAILLM",
    "ShellSession",
    "ToolCall",
    "Toolbox",
    "Workspace",
]
