"""Models by name: made once, in one step, with a template that shows what an agent loop sends."""

import hashlib
import json
import multiprocessing
import time
from pathlib import Path

import pytest

from leyline_server_ext.embedded import ModelError, _store, ensure_model
from leyline_server_ext.embedded._command import resolve_dtype
from leyline_server_ext.embedded._templates import chat_template


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEYLINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def quiet(_message: str) -> None:
    return


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LEYLINE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _store.cache_root() == tmp_path / "leyline"
    monkeypatch.setenv("LEYLINE_CACHE", str(tmp_path / "own"))
    assert _store.cache_root() == tmp_path / "own"


def test_unknown_name_and_empty_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tiny-mla"):
        ensure_model("tiny-mlx")
    with pytest.raises(ModelError, match=r"config\.json"):
        ensure_model(str(tmp_path))


def test_folder_with_a_config_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert ensure_model(str(tmp_path)) == tmp_path.resolve()


def test_failed_making_leaves_nothing_and_can_be_repeated(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ModelError("no")

    with pytest.raises(ModelError):
        _store.ensure("thing", fail, quiet)
    assert [path.name for path in (cache / "models").iterdir()] == [".thing.lock"]
    path = _store.ensure("thing", lambda folder: (folder / "whole").touch(), quiet)
    assert [file.name for file in path.iterdir()] == ["whole"]
    assert _store.ensure("thing", fail, quiet) == path  # not made again


def test_unwritable_cache_is_a_model_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LEYLINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot prepare"):
        _store.ensure("thing", quiet, quiet)  # type: ignore[arg-type]


def _make_slowly(folder: Path) -> None:
    with (folder.parents[1] / "log").open("a") as log:
        log.write("made\n")
    time.sleep(0.5)


def _ensure_slowly() -> None:
    _store.ensure("slow", _make_slowly, quiet)


def test_processes_that_want_the_same_model_make_it_once(cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_ensure_slowly) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert (cache / "log").read_text() == "made\n"


@pytest.mark.parametrize("name", ["tiny-mla", "tiny-gqa"])
def test_tiny_models_are_deterministic(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    digests = set()
    for attempt in ("one", "two"):
        monkeypatch.setenv("LEYLINE_CACHE", str(tmp_path / attempt))
        folder = ensure_model(name)
        digests.add(hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest())
    assert len(digests) == 1
    config = json.loads((folder / "config.json").read_text())
    assert config["max_position_embeddings"] == 8192
    rope = config["rope_parameters"]
    assert rope["rope_type"] == {"tiny-mla": "yarn", "tiny-gqa": "default"}[name]


def test_tiny_tokenizer_round_trips_any_text() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ensure_model("tiny-gqa"))
    text = "déjà vu \n\t 漢字 <|im_start|> 0x1F"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.replace("<|im_start|>", "").encode()) + 1
    assert max(ids) < len(tokenizer)


MESSAGES = [
    {"role": "user", "content": "Fix it."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "read", "arguments": {"path": 'a"b.py', "n": 3}}},
            {"id": "2", "type": "function", "function": {"name": "list", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "x = 1 < 2"},
    {"role": "assistant", "content": "Done."},
]
TOOLS = [{"type": "function", "function": {"name": "read", "description": "é <x>", "parameters": {}}}]


@pytest.fixture(scope="module")
def tokenizer() -> object:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(ensure_model("tiny-gqa"))


def render(tokenizer: object, messages: list[dict[str, object]], **options: object) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))  # type: ignore[attr-defined]


def test_template_shows_calls_results_and_tools(tokenizer: object) -> None:
    text = render(tokenizer, MESSAGES, tools=TOOLS, add_generation_prompt=True)
    assert '<tool_call>\n{"name": "read", "arguments": {"path": "a\\"b.py", "n": 3}}\n</tool_call>' in text
    assert '<tool_call>\n{"name": "list", "arguments": {}}\n</tool_call>' in text
    assert "<|im_start|>tool\n<tool_response>\nx = 1 < 2\n</tool_response><|im_end|>\n" in text
    assert '"description": "é <x>"' in text
    assert text.endswith("<|im_start|>assistant\n")
    assert "None" not in text


def test_template_of_a_longer_history_keeps_its_prefix(tokenizer: object) -> None:
    whole = render(tokenizer, MESSAGES, tools=TOOLS)
    for count in range(1, len(MESSAGES)):
        assert whole.startswith(render(tokenizer, MESSAGES[:count], tools=TOOLS))


def test_template_without_tools_is_plain_chatml(tokenizer: object) -> None:
    messages: list[dict[str, object]] = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert render(tokenizer, messages) == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    assert render(tokenizer, messages[1:]) == "<|im_start|>user\nU<|im_end|>\n"


def test_default_system_message_stands_in_for_a_missing_one() -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template(chat_template("Be kind."))
    user = [{"role": "user", "content": "U"}]
    assert template.render(messages=user) == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    assert "Be kind." not in template.render(messages=[{"role": "system", "content": "S"}, *user])


def test_dtype_follows_the_cpu() -> None:
    assert resolve_dtype("auto", frozenset({"avx2", "avx512f"})) == "float32"
    assert resolve_dtype("auto", frozenset({"avx512_bf16"})) == "bfloat16"
    assert resolve_dtype("float16", frozenset({"avx512_bf16"})) == "float16"
    assert resolve_dtype("auto") in ("float32", "bfloat16")
