"""The embedded server as a whole: it answers like the model, and goes when its owner is killed."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from leyline_server_ext.embedded import EmbeddedServer, ensure_model
from leyline_server_ext.embedded._smollm2 import _DEFAULT_SYSTEM
from leyline_server_ext.embedded.reaper import descendants

pytest.importorskip(
    "sglang", reason="SGLang is not installed in this environment: use the server environment (make test)"
)
pytestmark = pytest.mark.server


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=300, trust_env=False) as client:
        yield client


def generate(http: httpx.Client, server: EmbeddedServer, ids: list[int]) -> dict[str, Any]:
    """One greedy token with its five best log-probabilities."""
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    reply = http.post(f"{server.base_url}/generate", json={**body, "return_logprob": True, "top_logprobs_num": 5})
    return dict(reply.raise_for_status().json()["meta_info"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny_mla", "tiny_gqa"])
def test_appended_tokens_get_the_logits_of_transformers(
    name: str, request: pytest.FixtureRequest, http: httpx.Client
) -> None:
    """The absorbed MLA and the attention over new queries only, against transformers' own forward in fp32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    server: EmbeddedServer = request.getfixturevalue(f"server_{name}")
    rng = random.Random(f"append {name}")
    prompt = [rng.randrange(250) for _ in range(300)]
    whole = prompt + [rng.randrange(250) for _ in range(7)]
    assert generate(http, server, prompt)["cached_tokens"] < 3
    found = generate(http, server, whole)
    assert found["cached_tokens"] == 300
    folder = ensure_model(server.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.tensor([whole])).logits[0, -1].log_softmax(-1)
    for logprob, token, _ in found["output_top_logprobs"][0]:
        assert logprob == pytest.approx(float(expected[token]), abs=2e-4)
    assert found["output_top_logprobs"][0][0][1] == int(expected.argmax())


@pytest.mark.slow
def test_smollm2_answers(server_smollm2: EmbeddedServer, http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 16}
    reply = http.post(f"{server_smollm2.base_url}/v1/chat/completions", json=body).raise_for_status().json()
    assert "Paris" in reply["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_smollm2_tokenizer_and_template() -> None:
    """Plain messages render as with the model's own template; digits are single tokens."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ensure_model("smollm2"))
    messages = [
        {"role": "user", "content": "Count to 1024."},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": ""},
    ]
    own = f"<|im_start|>system\n{_DEFAULT_SYSTEM}<|im_end|>\n" + "".join(
        f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == own
    assert tokenizer.tokenize("x=1024") == ["x", "=", "1", "0", "2", "4"]
    assert tokenizer.eos_token == "<|im_end|>"


OWNER = """
import sys, time
from leyline_server_ext.embedded import EmbeddedServer
server = EmbeddedServer("tiny-gqa", stock=True, max_total_tokens=4096).start()
print(*server.pids(), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_sigkill_of_the_owner_ends_every_server_process() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            pids = [int(pid) for pid in owner.stdout.readline().split()]
        finally:
            owner.kill()
    assert len(pids) >= 3
    _wait_gone(pids)


@pytest.mark.slow
def test_ctrl_c_ends_leyline_serve_and_every_process() -> None:
    command = [sys.executable, "-m", "leyline_client.cli", "serve", "--embedded", "--model", "tiny-gqa", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            serving = next(line for line in lines if line.startswith("serving "))
            pids = descendants(process.pid)
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            code = process.wait(60)
        finally:
            process.kill()
    assert "tiny-gqa at http://127.0.0.1:" in serving
    assert len(pids) >= 4
    assert (code, rest) == (0, "stopped\n")
    _wait_gone(pids)


def _wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if _running(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.1)


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
