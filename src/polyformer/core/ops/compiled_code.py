"""Code that torch compiles, and its cache on disk for later processes.

Both caches, torch's and this library's, contain pickles and machine code, so a process reads only what this
user has written (`core/private_files.py`).
"""

import atexit
import functools
import hashlib
import inspect
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.compiler import config

from polyformer.core.errors import InputError, caution
from polyformer.core.ops import computed_once, row_product
from polyformer.core.paths import cache_folder
from polyformer.core.private_files import SharedError, private_folder, read_signed, write_signed

MOST_FILES = 200
"""The most compiled graphs in the cache folder, of about a megabyte each."""


def prepare_inductor() -> None:
    """Let this process load only code that was compiled for its instructions, by a compiler of C++.

    torch (2.13) does not include the instruction set in the keys of its cache. A loop generated for AVX-512
    takes steps of 16 numbers. A process limited to AVX2 that loads it computes 8 of them and leaves the other
    8 uninitialised, without an error; FlexAttention's kernel crashes. This happens if different processors
    share a cache folder, and after a change of `ATEN_CPU_CAPABILITY`.

    With `CXX=gcc` the compiled code lacks the C++ library, and a process without this library cannot load it,
    so g++ takes its place.
    """
    _use_private_cache()
    own = torch.backends.cpu.get_cpu_capability()
    if own not in config.cache_key_tag.split():
        config.cache_key_tag = f"{config.cache_key_tag} {own}".strip()
    compiler = _cpp_compiler()
    if compiler is not None:
        from torch._inductor import config as inductor

        inductor.cpp.cxx = (None, compiler)


def _use_private_cache() -> None:
    """Replace torch's cache folder for this process if other users can write to it.

    Its default is a predictable name in the folder for temporary files, which any user can create first.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = Path(os.environ.get(_TORCH_CACHE) or default_cache_dir())
    try:
        private_folder(folder)
    except (SharedError, OSError) as error:
        _warn(error)
        own = tempfile.mkdtemp(prefix="torchinductor_")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        os.environ[_TORCH_CACHE] = own


_TORCH_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def _warn(reason: Exception) -> None:
    caution(f"compile: compiles again, because no code is read from a cache: {reason}")


def _cpp_compiler() -> str | None:
    """Return the compiler to use instead of `CXX`; None for torch's choice."""
    path = Path(os.environ.get("CXX", ""))
    compiler = re.sub(r"^(g|clang)(?:cc)?(?=$|-\d)", lambda match: f"{match[1]}++", path.name)
    return shutil.which(str(path.with_name(compiler))) if compiler != path.name else None


def compiled_graph(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Return a graph compiled by Inductor for inputs of the same shapes, strides and types as `inputs`.

    The result stays in the user's cache folder; the next process reads it in a second instead of compiling
    for many. Raises `InputError` if torch cannot compile.
    """
    prepare_inductor()
    file = _file(module, inputs)
    with warnings.catch_warnings():  # of torch about itself
        warnings.simplefilter("ignore", DeprecationWarning)
        return _stored(file) or _compiled(file, module, inputs)


def _file(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Path | None:
    """Return the file of a compiled graph; None without a home folder."""
    forms = [(x.shape, x.stride(), x.dtype, x.device) for x in inputs]
    machine = torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    key = hashlib.sha256(repr((module.code, forms, machine, _lowerings())).encode()).hexdigest()[:32]
    try:
        return cache_folder() / "graphs" / f"{key}.bin"
    except RuntimeError:
        return None


@functools.cache
def _lowerings() -> str:
    """Return a digest of the code that decides what this library's operations are compiled to."""
    sources = map(inspect.getsource, (row_product, computed_once, sys.modules[__name__]))
    return hashlib.sha256("".join(sources).encode()).hexdigest()


def _stored(file: Path | None) -> Any:
    """Return the graph in a file of this user; None if it is missing or damaged, or cannot be built."""
    if file is None:
        return None
    from torch._inductor import config as inductor
    from torch._inductor.standalone_compile import CompiledArtifact

    try:
        content = read_signed(file)
        if content is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            # torch reads a file; the original may have been replaced since it was checked.
            checked = Path(folder, file.name)
            checked.write_bytes(content)
            # Testing which instructions the compiler can use takes a second; they are those of the file.
            with inductor.patch({"cpp.vec_isa_ok": True}):
                return CompiledArtifact.load(path=str(checked), format="binary")
    except SharedError as error:
        _warn(error)
        return None
    except Exception:  # of torch, for a file of another version or a lack of a compiler
        return None


def _compiled(file: Path | None, module: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
    """Compile a graph, and write it to the file if that is possible."""
    from torch._inductor import standalone_compile  # takes a second
    from torch._inductor.exc import InductorError

    row_product.register_lowering()
    computed_once.register_lowering()
    try:
        compiled = standalone_compile(module, list(inputs), dynamic_shapes="from_example_inputs")
    except InductorError as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"compile: torch could not compile ({reason}); install a C++ compiler, or leave it out"
        ) from error
    if file is not None:
        _store(file, compiled)
    return compiled


def _store(file: Path, compiled: Any) -> None:
    """Write a graph; without success the next process compiles it again."""
    try:
        write_signed(file, lambda partial: compiled.save(path=str(partial), format="binary"))
        for old in sorted(file.parent.glob("*.bin"), key=lambda path: path.stat().st_mtime)[:-MOST_FILES]:
            old.unlink(missing_ok=True)
    except (OSError, InputError, RuntimeError, SharedError):
        pass
