"""`make demo`: an agent fixes a small program, three times side by side, with its history edited or not.

    python examples/demo/run.py                                   starts the embedded server (SGLang on the CPU)
    python examples/demo/run.py --base-url http://host:30000      uses a running one

Writes out/demo.json and out/demo.png. Exit code 0 only if the program's tests pass in every arm at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from bugfix.agent import ARMS, MAX_NEW_TOKENS, Agent, open_session
from bugfix.plot import draw
from bugfix.script import Step, read_script
from bugfix.summary import summary
from bugfix.table import arm_row, header, said_line, turn_title
from bugfix.workspace import Workspace

from leyline_client import Directive, LeylineClient, LeylineError, LeylineSession, ServerInfo, SpliceRequest
from leyline_evals.machine import machine_facts, write_json

POLICIES = ["truncate-older-than-n", "stale-tool-detector"]
_INTERRUPTED = 130


def main() -> int:
    """Run the demo; returns the exit code."""
    options = _options()
    signal.signal(signal.SIGTERM, _terminate)
    began = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            base_url = options.base_url or stack.enter_context(_embedded())
            with LeylineClient(base_url) as client:
                info = client.info()
            _introduce(info, options)
            _warm_up(base_url)
            agents = _open_agents(stack, base_url, options)
            _run(agents, read_script())
            fixed = {arm: agent.workspace.tests_pass() for arm, agent in agents.items()}
            return _report(agents, fixed, info, options, time.monotonic() - began)
    except KeyboardInterrupt:
        _say("\ninterrupted; the server and the temporary folders are gone")
        return _INTERRUPTED
    except LeylineError as error:
        _say(f"\n{type(error).__name__}: {error}")
        return 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="root of a running server with the extension; default: start one here")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for demo.json and demo.png")
    parser.add_argument("--policy", action="append", dest="policies", help="policy of the editing arms; repeatable")
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, help="tokens generated per turn")
    options = parser.parse_args()
    options.policies = options.policies or POLICIES
    return options


def _terminate(*_: object) -> NoReturn:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _embedded() -> Iterator[str]:
    from leyline_server_ext.embedded import EmbeddedError, EmbeddedServer

    try:
        with EmbeddedServer("smollm2", progress=_say) as server:
            yield server.base_url
    except EmbeddedError as error:
        _say(f"\n{error}")
        raise SystemExit(1) from None


def _introduce(info: ServerInfo, options: argparse.Namespace) -> None:
    _say(f"""
An agent with four tools (list, read, edit, run the tests) fixes a small Python program in a temporary folder.
  real       the tools, the program, its tests; the served model ({info.model}) and every sentence it says
  scripted   which tool is called in which turn: a model this small cannot debug
  arms       keep-all: the history is never edited
             forget:   policies edit it, everything after an edit is computed again
             amortize: the same edits, spliced into the KV cache
  policies   {", ".join(options.policies)}
The arms take each turn one after the other, in changing order, and share no cache.
Columns are tokens: rotated is the part of cached that a splice moved; prefilled was computed in this turn.
Takes some minutes. Tokens do not depend on what else the machine does, TTFT does: if it is busy, look at the tokens.
""")


def _warm_up(base_url: str) -> None:
    """One turn of each kind that nobody counts, so that no arm pays for what client and server do once."""
    salt = secrets.token_hex(8)
    with LeylineSession(base_url, cache_salt=salt) as session:
        messages = [{"role": "user", "content": "Hello"}]
        for _ in session.chat.completions.create(model="default", messages=messages, max_tokens=2, stream=True):
            pass
        client = session.client
        reply = client.splice(SpliceRequest(append=tuple(range(32, 224)) * 3, cache_salt=salt))
        edit = Directive(start=100, end=200, replacement=(40, 41, 42))
        again = SpliceRequest(session=reply.session, directives=(edit,), append=(50,), cache_salt=salt)
        client.delete_session(client.splice(again).session, cache_salt=salt)


def _open_agents(stack: contextlib.ExitStack, base_url: str, options: argparse.Namespace) -> dict[str, Agent]:
    salt = secrets.token_hex(8)
    agents = {}
    for arm in ARMS:
        session = stack.enter_context(open_session(arm, base_url, options.policies, salt))
        agents[arm] = Agent(session, stack.enter_context(Workspace()), max_new_tokens=options.max_new_tokens)
    return agents


def _run(agents: dict[str, Agent], script: list[Step]) -> None:
    _say(header())
    names = list(agents)
    for number, step in enumerate(script, start=1):
        _say(turn_title(number, len(script), step))
        first = number % len(names)
        for name in names[first:] + names[:first]:
            agents[name].take_turn(step)
        for name in names:
            _say(arm_row(name, agents[name].rows[-1]))
        _say(said_line(agents["amortize"].said))


def _report(
    agents: dict[str, Agent], fixed: dict[str, bool], info: ServerInfo, options: argparse.Namespace, seconds: float
) -> int:
    arms = {arm: agent.rows for arm, agent in agents.items()}
    server = {
        **info.model_dump(mode="json"),
        "embedded": options.base_url is None,
        "policies": options.policies,
        "machine": machine_facts(),
    }
    out: Path = options.out
    write_json(
        out / "demo.json",
        {"server": server, "arms": {arm: [row.as_dict() for row in rows] for arm, rows in arms.items()}},
    )
    _say(f"\n{summary(arms)}\n")
    files = [out / "demo.json"]
    try:
        draw(arms, out / "demo.png")
        files.append(out / "demo.png")
    except ImportError:
        _say("no plot: matplotlib is not installed")
    _say(f"wrote {' and '.join(map(str, files))}; {seconds:.0f} s in all")
    broken = [arm for arm, good in fixed.items() if not good]
    _say(
        f"the program's tests still fail in: {', '.join(broken)}" if broken else "the program's tests pass in every arm"
    )
    return 1 if broken else 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
