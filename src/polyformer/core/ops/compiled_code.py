"""Code that torch compiles: two operations for it, files that only this user can write, and the compilation.

`row_product` is the product of a single row with a weight, for graphs that torch compiles for a CPU. The
compiled code is a loop over the weight as it is, joined with the operations behind it. It reads memory faster
than a library does, and a call of the library also costs 20 microseconds. `computed_once` is a value that
compiled code computes before the loops that read it. torch's compiler joins operations to the loop that reads
their result; if each turn of a loop reads the same numbers, they would be computed again in each turn.

Both caches, torch's and this library's, contain pickles and machine code. A file that can run code is read
only from a folder that only this user can write, with the signature of a key that no other user can read. So
neither a file that another user puts into a shared cache folder is run, nor one that comes with an archive or
a copied folder.
"""

import atexit
import functools
import hashlib
import hmac
import inspect
import os
import re
import secrets
import shutil
import stat
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
from polyformer.core.files import atomic_write, open_file
from polyformer.core.ops.cpu import use_huge_pages
from polyformer.core.paths import cache_folder, state_folder

_library = torch.library.Library("polyformer", "FRAGMENT")
_library.define("row_product(Tensor x, Tensor weight) -> Tensor")


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [..., I] of a single row times weight [O, I] transposed, plus bias [O]: [..., O].

    weight: contiguous.
    """
    use_huge_pages(weight.data_ptr(), weight.nbytes)
    y = torch.ops.polyformer.row_product.default(x.reshape(-1), weight)
    return (y if bias is None else y + bias).view(*x.shape[:-1], -1)


def _row_product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the product outside compiled code, which is when a graph is recorded."""
    return torch.mv(weight, x)


_library.impl("row_product", _row_product, "CPU")


@torch.library.register_fake("polyformer::row_product", lib=_library)
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(len(weight))


@functools.cache
def register_row_product() -> None:
    """Let torch's compiler compute the product; the import takes a second."""
    from torch._inductor.lowering import lowerings, register_lowering, to_dtype

    aten = torch.ops.aten

    def lower(x: Any, weight: Any) -> Any:
        x.realize()  # else the operations before would be repeated for every output
        wide = torch.promote_types(x.get_dtype(), torch.float32)
        products = lowerings[aten.mul.Tensor](to_dtype(weight, wide), to_dtype(x, wide))
        return to_dtype(lowerings[aten.sum.dim_IntList](products, [1]), x.get_dtype())

    register_lowering(torch.ops.polyformer.row_product.default, type_promotion_kind=None)(lower)


_library.define("computed_once(Tensor x) -> Tensor")


def computed_once(x: Tensor) -> Tensor:
    """Return x, which a graph that is compiled for a CPU stores before it is read."""
    return torch.ops.polyformer.computed_once.default(x)


_library.impl("computed_once", torch.clone, "CPU")


@torch.library.register_fake("polyformer::computed_once", lib=_library)
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@functools.cache
def register_computed_once() -> None:
    """Let torch's compiler store the value; the import takes a second."""
    from torch._inductor.lowering import register_lowering

    def lower(x: Any) -> Any:
        x.realize()
        return x

    register_lowering(torch.ops.polyformer.computed_once.default, type_promotion_kind=None)(lower)


SIGNATURE = hashlib.sha256().digest_size
"""The bytes before the content of a signed file."""

_KEY = "key"
_OTHERS_WRITE, _OTHERS = stat.S_IWGRP | stat.S_IWOTH, stat.S_IRWXG | stat.S_IRWXO


class SharedError(Exception):
    """A file or folder is not this user's, or others can change it; the message has the way out."""


def private_folder(path: Path) -> Path:
    """Return the folder `path`, created for this user only if it does not exist.

    Raises `SharedError` if it belongs to another user, or others can write to it.
    """
    path.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    _check(path, path.stat(), _OTHERS_WRITE)
    return path


def write_signed(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file by `write(path)`, atomically and with a signature, into a private folder.

    Raises `SharedError` if others can change the folder or read the key, and `InputError` as `atomic_write`.
    """

    def signed(partial: Path) -> None:
        write(partial)
        content = partial.read_bytes()
        partial.write_bytes(_signature(path, content) + content)
        partial.chmod(stat.S_IRUSR | stat.S_IWUSR)

    private_folder(path.parent)
    atomic_write(path, signed)


def read_signed(path: Path) -> bytes | None:
    """Return the content of a file by `write_signed`; None for a missing, damaged, renamed or foreign file.

    Raises `SharedError` if others can change the file or its folder, or read the key.
    """
    private_folder(path.parent)
    if not path.is_file():
        return None
    with open_file(path) as file:
        _check(path, os.fstat(file.fileno()), _OTHERS_WRITE)
        signature, content = file.read(SIGNATURE), file.read()
    return content if hmac.compare_digest(signature, _signature(path, content)) else None


def _signature(path: Path, content: bytes) -> bytes:
    """Return the signature of a file's name and content."""
    return hmac.digest(_key(), path.name.encode() + b"\0" + content, "sha256")


def _key() -> bytes:
    """Return the key of this user, which is generated at first use."""
    path = private_folder(state_folder()) / _KEY
    try:
        return _read_key(path)
    except FileNotFoundError:
        new = path.with_name(f".{_KEY}.{secrets.token_hex(4)}.partial")
        with open(
            new, "xb", opener=lambda name, flags: os.open(name, flags, stat.S_IRUSR | stat.S_IWUSR)
        ) as file:
            file.write(secrets.token_bytes(SIGNATURE))
        try:
            os.link(new, path)  # complete at once, and never in the place of another process's key
        except FileExistsError:
            pass
        finally:
            new.unlink()
        return _read_key(path)


def _read_key(path: Path) -> bytes:
    with open_file(path) as file:
        _check(path, os.fstat(file.fileno()), _OTHERS)
        key = file.read()
    if len(key) != SIGNATURE:
        raise SharedError(f"{path}: damaged; remove it")
    return key


def _check(path: Path, status: os.stat_result, forbidden: int) -> None:
    """Raise `SharedError` if a file or folder is of another user, or has `forbidden` bits of its mode."""
    if status.st_uid != os.getuid():
        raise SharedError(f"{path} belongs to another user; remove it")
    if status.st_mode & forbidden:
        mode = stat.S_IMODE(status.st_mode & ~forbidden)
        raise SharedError(
            f"{path} is open to other users; remove what they put there, then chmod {mode:o} it"
        )


_TORCH_CACHE = "TORCHINDUCTOR_CACHE_DIR"


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
    return hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()


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

    register_row_product()
    register_computed_once()
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


MOST_FILES = 200
"""The most compiled graphs in the cache folder, of about a megabyte each."""


def _store(file: Path, compiled: Any) -> None:
    """Write a graph; without success the next process compiles it again."""
    try:
        write_signed(file, lambda partial: compiled.save(path=str(partial), format="binary"))
        for old in sorted(file.parent.glob("*.bin"), key=lambda path: path.stat().st_mtime)[:-MOST_FILES]:
            old.unlink(missing_ok=True)
    except (OSError, InputError, RuntimeError, SharedError):
        pass
