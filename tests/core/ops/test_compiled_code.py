"""Compiled code: its cache on disk, the product of a single row, and values that are computed once."""

import os
import pickle
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code
from torch.compiler import config

from polyformer.attention.functional.backends import flex
from polyformer.core.ops import compiled_code
from polyformer.core.ops.compiled_code import computed_once, prepare_inductor, register_computed_once
from polyformer.core.ops.linear import Linear
from polyformer.core.recorded_graph import record
from polyformer.models.generation.packed_weights import PackedCopies, PackedWeights
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


class Malicious:
    """A pickle of it creates a file."""

    def __init__(self, evidence: Path):
        self.evidence = evidence

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, int]]:
        return os.mkfifo, (str(self.evidence), 0o600)


def artifact(content: bytes) -> bytes:
    """A compiled graph as torch writes it, with this pickle inside."""
    from torch._inductor.codecache import torch_key
    from torch._inductor.standalone_compile import AOTCompiledArtifact
    from torch.utils._appending_byte_serializer import BytesWriter

    writer = BytesWriter()
    for part in (AOTCompiledArtifact.AOT_HEADER, torch_key(), content):
        writer.write_bytes(part)
    return writer.to_bytes()


@pytest.fixture
def graph_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a compiled graph in a new cache folder of this user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    module = fx.symbolic_trace(nn.ReLU())
    file = compiled_code._file(module, [torch.ones(2)])
    assert file is not None
    file.parent.mkdir(mode=0o700, parents=True)
    return file


def test_a_graph_that_this_user_has_not_compiled_is_never_unpickled(graph_file: Path, tmp_path: Path) -> None:
    graph_file.write_bytes(artifact(pickle.dumps(Malicious(tmp_path / "evidence"))))
    assert compiled_code._stored(graph_file) is None
    assert not (tmp_path / "evidence").exists()


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_shared_folder_of_graphs_is_neither_read_nor_written(graph_file: Path, mode: int) -> None:
    graph_file.parent.chmod(mode)
    with pytest.warns(UserWarning, match=r"compiles again, .*graphs is open to other users"):
        assert compiled_code._stored(graph_file) is None
    compiled_code._store(graph_file, None)
    assert not graph_file.exists()


def test_a_changed_lowering_is_compiled_anew(graph_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = fx.symbolic_trace(nn.ReLU())
    assert compiled_code._file(module, [torch.ones(2)]) == graph_file
    monkeypatch.setattr(compiled_code, "_lowerings", lambda: "of another version")
    assert compiled_code._file(module, [torch.ones(2)]) != graph_file


def test_torch_s_cache_is_where_no_other_user_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, shared = tmp_path / "own", tmp_path / "shared"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(own))
    with warnings.catch_warnings(action="error"):
        prepare_inductor()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(own)
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared))
    with pytest.warns(UserWarning, match=r"compiles again, .*shared is open to other users"):
        prepare_inductor()
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert folder not in (own, shared)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


TOLERANCE = {torch.float64: 1e-13, torch.bfloat16: 0.02}
PRODUCT = torch.ops.polyformer.row_product.default


def layers() -> list[nn.Linear]:
    """Layers in float64 of odd sizes, with and without a bias."""
    torch.manual_seed(0)
    both = Linear(301, 67), Linear(301, 9, bias=False)
    return [layer.double().requires_grad_(False) for layer in both]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_graph_of_a_single_row_gives_the_products_of_torch(dtype, is_compiled):
    first, second = (layer.to(dtype) for layer in layers())
    packed = PackedWeights(PackedCopies())

    def read(x: Tensor) -> tuple[Tensor, ...]:
        with packed:
            x = x.sin()
            return packed.activated(x, first, "gelu"), *packed.linears(x, [first, second])

    x = torch.randn(1, 1, 301, dtype=dtype)
    with torch.no_grad():
        graph = record(read, [x])
        assert sum(node.target is PRODUCT for node in graph.module.graph.nodes) == 3
        run = graph.compiled([x]) if is_compiled else lambda x: graph.module(x, *graph.constants)
        for inputs in (x, -2 * x):
            exact = [layer(inputs.sin().double()) for layer in layers()]
            for y, expected in zip(run(inputs), [F.gelu(exact[0]), *exact], strict=True):
                assert y.dtype == dtype
                torch.testing.assert_close(y.double(), expected, rtol=0, atol=TOLERANCE[dtype])


def test_other_products_use_a_library():
    first, _ = layers()
    transposed = nn.Parameter(first.weight.T.contiguous().T, requires_grad=False)
    packed = PackedWeights(None)

    def read(x: Tensor) -> tuple[Tensor, ...]:
        with packed:
            return packed.linear(x, first.weight, None), packed.linear(x[:1], transposed, None)

    with torch.no_grad():
        graph = record(read, [torch.randn(2, 301, dtype=torch.float64)])
    assert all(node.target is not PRODUCT for node in graph.module.graph.nodes)


ROWS = "997L"


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("once", [False, True])
def test_the_loop_over_rows_reads_the_value(once: bool):
    prepare_inductor()
    register_computed_once()
    x, rows = torch.randn(64), torch.randn(997, 64)

    def products(x: Tensor, rows: Tensor) -> Tensor:
        size = x.abs()
        return (rows * (computed_once(size) if once else size)).sum(-1)

    torch.compiler.reset()
    y, [code] = run_and_get_code(torch.compile(products, fullgraph=True), x, rows)
    torch.testing.assert_close(y, rows @ x.abs())
    assert (code.rindex(".abs()") < code.index(ROWS)) == once
