"""The stand-in for sgl_kernel pretends nothing."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import leyline_server_ext.embedded

PATH = Path(leyline_server_ext.embedded.__file__).parent / "stand_in" / "sgl_kernel" / "__init__.py"


@pytest.fixture
def stand_in() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sgl_kernel_stand_in", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_calling_a_kernel_raises_and_names_it(stand_in: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.copy_all_layer_kv_cache_cpu"):
        stand_in.copy_all_layer_kv_cache_cpu()


@pytest.mark.parametrize("name", ["silu_and_mul", "rmsnorm", "flash_attn", "cpu"])
def test_other_names_do_not_exist(stand_in: ModuleType, name: str) -> None:
    assert not hasattr(stand_in, name)
    with pytest.raises(AttributeError, match=name):
        getattr(stand_in, name)
