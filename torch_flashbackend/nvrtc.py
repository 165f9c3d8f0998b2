"""Compile CUDA C++ at run time: NVRTC through cuda.bindings, and a cache of the binaries on disk.

May import nothing of this package. Imported by the launchers in ``kernels/cuda``, by routing (is there a compiler?)
and by the warm-up. No GPU is needed: ``driver.py`` loads and launches what is compiled here.

The disk cache is ``$TORCH_FLASHBACKEND_CACHE``, or ``torch_flashbackend`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. A
file in it is code that will run with the user's rights: one that another user owns or may write is not read, and nor
is anything in such a folder (the superuser's are trusted). Files appear whole or not at all, so any number of
processes may share it. Whatever goes wrong with it costs a compilation and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "CACHE_VARIABLE",
    "Binary",
    "CompileError",
    "Source",
    "cache_folder",
    "compile",
    "forget",
    "unavailable",
    "version",
]

CACHE_VARIABLE = "TORCH_FLASHBACKEND_CACHE"
_OPTIONS = ("-std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v")
_MAGIC = b"torch_flashbackend 1\n"
# Our own binaries have some tens to hundreds of kilobytes; what is larger is not ours.
_LARGEST = 1 << 26


class CompileError(RuntimeError):
    """NVRTC is missing or rejects the source; the message has its log."""


class Source(NamedTuple):
    """All that decides a binary, but for the compiler's version.

    name: for messages and file names, like "flash_forward". text: the translation unit. headers: what it may include,
    name to text, files and generated ones alike. defines: macros. arch: a real architecture, "sm_90a".
    """

    name: str
    text: str
    headers: Mapping[str, str] = {}
    defines: Mapping[str, Any] = {}
    arch: str = "sm_90a"
    options: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        """NVRTC's command line."""
        macros = (f"-D{name}={_macro(value)}" for name, value in self.defines.items())
        return (f"-arch={self.arch}", *_OPTIONS, *self.options, *macros)

    def key(self, version: str) -> str:
        """A hash of everything here and of the compiler's version."""
        digest = hashlib.sha256()
        parts = [version, self.name, self.text, *self.flags]
        for header in sorted(self.headers.items()):
            parts += header
        for part in parts:
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.hexdigest()


class Binary(NamedTuple):
    """A compiled kernel. key: its hash, unique. cubin: the ELF image. log: what ptxas reports (registers, spills)."""

    key: str
    cubin: bytes
    log: str


def _macro(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------------------------- compiler


@functools.cache
def _nvrtc() -> Any:
    return importlib.import_module("cuda.bindings.nvrtc")


@functools.cache
def unavailable() -> str | None:
    """Why nothing can be compiled here, in a user's words; None if it can. Finds and loads the library, once."""
    try:
        if importlib.util.find_spec("cuda.bindings.nvrtc") is None:
            raise ModuleNotFoundError
    except ModuleNotFoundError:
        return "the package cuda-bindings is not installed (CUDA builds of torch bring it; so does our extra `warmup`)"
    try:
        version()
    except Exception as error:  # cuda.bindings and its finder of libraries have errors of their own kinds
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return f"NVRTC, CUDA's run-time compiler, cannot be loaded: {reason}"
    return None


@functools.cache
def version() -> str:
    """NVRTC's version, and its package's. Raises what loading it raises."""
    status, major, minor = _nvrtc().nvrtcVersion()
    if int(status):
        raise CompileError(f"nvrtcVersion failed: {status}")
    # The full version: a patch release may generate other code.
    try:
        return f"{major}.{minor} {importlib.metadata.version('nvidia-cuda-nvrtc')}"
    except Exception:
        return f"{major}.{minor}"


def _run_nvrtc(source: Source) -> tuple[bytes, str]:
    nvrtc = _nvrtc()

    def check(result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise CompileError(f"{source.name}: {result[0].name}")
        return result[1] if len(result) == 2 else None

    names = [name.encode() for name in source.headers]
    texts = [text.encode() for text in source.headers.values()]
    file_name = f"{source.name}.cu".encode()
    program = check(nvrtc.nvrtcCreateProgram(source.text.encode(), file_name, len(names), texts, names))
    try:
        flags = [flag.encode() for flag in source.flags]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0 ").decode(errors="replace")
        if int(status):
            raise CompileError(f"{source.name} does not compile ({status.name}, {' '.join(source.flags)}):\n{text}")
        cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
        check(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin, text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


_binaries: dict[str, Binary] = {}
_building: dict[str, threading.Lock] = {}
_not_kept: str | None = None


def compile(source: Source, *, use_cache: bool = True) -> Binary:
    """The binary of a source: from this process, the disk, or NVRTC, in this order. Thread safe.

    use_cache: False compiles anew and stores nothing, for those who want the compiler's time or log.
    Raises CompileError.
    """
    reason = unavailable()
    if reason is not None:
        raise CompileError(reason)
    key = source.key(version())
    if not use_cache:
        return Binary(key, *_run_nvrtc(source))
    found = _binaries.get(key)
    if found is not None:
        return found
    with _building.setdefault(key, threading.Lock()):
        found = _binaries.get(key)
        if found is None:
            found = _load(source.name, key)
            if found is None:
                found = Binary(key, *_run_nvrtc(source))
                _store(source.name, found)
            _binaries[key] = found
    return found


def forget() -> None:
    """Drop what this process remembers; the disk cache stays."""
    global _not_kept
    _not_kept = None
    _binaries.clear()
    _building.clear()


# A lock that another thread held at the time of a fork would stay locked in the child for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_building.clear)


# ----------------------------------------------------------------------------------------------------------- disk cache


def cache_folder() -> Path | None:
    """Where binaries are kept; None where there is no home directory, or the variable is set to nothing."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen is not None:
        # "~" by hand: an image's settings are no shell's.
        return Path(os.path.expanduser(chosen)) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the standard asks to ignore relative ones
        return Path(base) / "torch_flashbackend"
    try:
        return Path.home() / ".cache" / "torch_flashbackend"
    except RuntimeError:
        return None


def cache_problem() -> str | None:
    """Why no binaries are kept on disk, in a user's words; None if they are, or the folder is not there yet."""
    folder = cache_folder()
    if folder is None:
        given = CACHE_VARIABLE in os.environ
        return f"{CACHE_VARIABLE} is set to nothing" if given else f"no home directory, and no {CACHE_VARIABLE}"
    try:
        # Not by Path.exists, which raises where a folder above may not be looked into: another user's home, say.
        with _folder(create=False) as descriptor:
            if not os.access(".", os.W_OK, dir_fd=descriptor):
                return f"{folder} is not writable"
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error)
    return None


def _trusted(status: os.stat_result) -> bool:
    """Nobody but this user and the superuser owns it or may write to it."""
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


@contextlib.contextmanager
def _folder(create: bool) -> Iterator[int]:
    """The cache folder, open; all files are reached through this, so that nobody can put another in its place.

    Raises OSError if there is none, or none to trust.
    """
    folder = cache_folder()
    if folder is None or not hasattr(os, "geteuid"):  # without owners to look at there is nothing to trust
        raise OSError("no folder that is known to be this user's")
    if create:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _trusted(os.fstat(descriptor)):
            raise PermissionError(f"{folder} belongs to another user, or others may write to it")
        yield descriptor
    finally:
        os.close(descriptor)


def _file_name(name: str, key: str) -> str:
    return f"{name}-{key[:40]}.cubin"


def _load(name: str, key: str) -> Binary | None:
    """A stored binary, None unless it is there, trusted, whole, and of this very key."""
    try:
        with _folder(create=False) as folder:
            descriptor = os.open(
                _file_name(name, key), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder
            )
            with open(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode) or not _trusted(status) or status.st_size > _LARGEST:
                    return None
                data = file.read()
    except OSError:
        return None
    header = len(_MAGIC) + 64
    if len(data) < header + 8 or data[: len(_MAGIC)] != _MAGIC:
        return None
    body = data[header:]
    if data[len(_MAGIC) : header] != hashlib.sha256(key.encode() + body).hexdigest().encode():
        return None
    length = int.from_bytes(body[:8], "little")
    return Binary(key, body[8 : 8 + length], body[8 + length :].decode(errors="replace"))


def not_kept() -> str | None:
    """Why something that this process has compiled is not on disk; None if all is."""
    return _not_kept


def _store(name: str, binary: Binary) -> None:
    """Write a binary where `_load` finds it; where that cannot be, `not_kept` says why."""
    global _not_kept
    body = len(binary.cubin).to_bytes(8, "little") + binary.cubin + binary.log.encode()
    digest = hashlib.sha256(binary.key.encode() + body).hexdigest().encode()
    temporary = f".{name}-{secrets.token_hex(8)}"
    try:
        with _folder(create=True) as folder:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
            try:
                with open(descriptor, "wb") as file:
                    file.write(_MAGIC + digest + body)
                os.replace(temporary, _file_name(name, binary.key), src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
    except OSError as error:
        _not_kept = cache_problem() or str(error)
