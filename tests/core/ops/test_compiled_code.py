"""Code compiled for other instructions is never loaded, and CXX may name a compiler of C."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor
from torch.compiler import config

from polyformer.attention.functional.backends import flex
from polyformer.core.ops.compiled_code import prepare_inductor
from polyformer.training.config import EngineConfig
from polyformer.training.distributed.fully_sharded import compile_layers
from polyformer.training.engine import Engine
from registered import nightly

CODE = """
import torch
import torch._inductor.config
torch._inductor.config.cpp_cache_precompile_headers = False  # they take longer than these loops
from polyformer.core.ops.compiled_code import prepare_inductor
prepare_inductor()
x = torch.arange(32.0)
assert torch.equal(torch.compile(lambda x: x * 2 + 1)(x), x * 2 + 1)
"""


@nightly
def test_processes_with_other_instructions_share_a_cache(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environment.pop("ATEN_CPU_CAPABILITY", None)
    # A machine may set CXX=gcc: code that it links lacks the C++ library, and a new process cannot load it.
    environment.pop("CXX", None)
    for limit in ({}, {"ATEN_CPU_CAPABILITY": "default"}):
        subprocess.run([sys.executable, "-c", CODE], env=environment | limit, check=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    "compile_",
    [
        lambda: Engine(EngineConfig(device="cpu", compile=True)).wrap(nn.Linear(2, 2)),
        lambda: compile_layers(nn.Linear(2, 2)),
        lambda: flex._compiled.__wrapped__(),
    ],
    ids=["training", "layers", "flex"],
)
def test_whatever_compiles_prepares_inductor(
    compile_: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "g++"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "gcc"))
    with config.patch(cache_key_tag="mine"), inductor.patch({"cpp.cxx": (None, "gcc")}):
        for _ in range(2):
            compile_()
        assert config.cache_key_tag == f"mine {torch.backends.cpu.get_cpu_capability()}"
        assert inductor.cpp.cxx == (None, str(compiler))


def test_a_compiler_of_c_is_replaced_by_its_compiler_of_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("g++", "g++-13", "clang++", "icpx"):
        (tmp_path / name).touch(mode=0o755)
    expected = {
        "gcc": "g++",
        "gcc-13": "g++-13",
        "clang": "clang++",
        "gcc-9": None,
        "g++": None,
        "icpx": None,
    }
    for name, compiler in expected.items():
        monkeypatch.setenv("CXX", str(tmp_path / name))
        with inductor.patch({"cpp.cxx": (None, "torch's")}):
            prepare_inductor()
            assert inductor.cpp.cxx == (None, str(tmp_path / compiler) if compiler else "torch's")
    monkeypatch.delenv("CXX")
    with inductor.patch({"cpp.cxx": (None, "torch's")}):
        prepare_inductor()
        assert inductor.cpp.cxx == (None, "torch's")
