"""The run-time compiler's disk cache, and launching: on a machine with no GPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import stat
import subprocess
import sys
import threading

import pytest
import torch

from torch_flashbackend import driver, nvrtc
from torch_flashbackend.kernels.cuda import sources
from torch_flashbackend.nvrtc import Binary, CompileError, Source

SOURCE = Source("answer", '#include "answer.cuh"\nextern "C" __global__ void answer(int* out) { *out = ANSWER; }')
needs_compiler = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=f"no compiler: {nvrtc.unavailable()}")
needs_owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="the disk cache is for systems with file owners")


def source(answer=42):
    return SOURCE._replace(headers={"answer.cuh": f"#define ANSWER {answer}\n"})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, str(folder))
    nvrtc.forget()
    yield folder
    nvrtc.forget()


@pytest.fixture
def compilations(monkeypatch):
    """Names of what was really compiled, by a compiler that takes no time and needs nothing installed."""
    names = []

    def run(source):
        names.append(source.name)
        return f"image of {source.name} {dict(source.headers)} {source.flags}".encode(), "ptxas info: none"

    monkeypatch.setattr(nvrtc, "_run_nvrtc", run)
    monkeypatch.setattr(nvrtc, "version", lambda: "13.0")
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    return names


def files(folder):
    return sorted(path for path in folder.iterdir() if path.is_file())


def compile_afresh(source):
    """As another process would: from the disk or by the compiler."""
    nvrtc.forget()
    return nvrtc.compile(source)


# ----------------------------------------------------------------------------------------------------------- the cache


@needs_owners
def test_second_process_reads_what_the_first_has_stored(folder, compilations):
    first = nvrtc.compile(source())
    assert nvrtc.compile(source()) is first
    second = compile_afresh(source())
    assert second == first and second is not first
    assert second.log == "ptxas info: none"
    assert compilations == ["answer"]


@pytest.mark.parametrize(
    "other",
    [
        SOURCE._replace(headers={"answer.cuh": "#define ANSWER 43\n"}),
        SOURCE._replace(headers={"answer.cuh": "#define ANSWER 42\n", "more.cuh": ""}),
        source()._replace(text=SOURCE.text + " "),
        source()._replace(defines={"STAGES": 2}),
        source()._replace(options=("-maxrregcount=64",)),
        source()._replace(arch="sm_100a"),
        source()._replace(name="question"),
    ],
)
def test_every_part_of_a_source_is_in_the_key(other):
    assert other.key("13.0") != source().key("13.0")


def test_compiler_version_is_in_the_key():
    assert source().key("13.0") != source().key("13.1")


def test_key_tells_where_one_text_ends_and_the_next_begins():
    one = Source("a", "bc", {"x": "yz"})
    assert one.key("1") != Source("ab", "c", {"x": "yz"}).key("1")
    assert one.key("1") != Source("a", "bc", {"xy": "z"}).key("1")


@needs_owners
@pytest.mark.parametrize("damage", ["flipped bit", "cut short", "empty", "another kernel's"])
def test_corrupt_file_is_compiled_again_and_repaired(folder, compilations, damage):
    good = nvrtc.compile(source())
    (path,) = files(folder)
    data = bytearray(path.read_bytes())
    if damage == "flipped bit":
        data[len(data) // 2 + 30] ^= 1
    elif damage == "cut short":
        data = data[:-3]
    elif damage == "empty":
        data = bytearray()
    else:
        nvrtc.compile(source(43))
        (other,) = (p for p in files(folder) if p != path)
        data = bytearray(other.read_bytes())
    path.write_bytes(data)
    before = len(compilations)
    assert compile_afresh(source()) == good
    assert len(compilations) == before + 1
    assert compile_afresh(source()) == good
    assert len(compilations) == before + 1


@needs_owners
def test_files_are_private_and_no_temporary_ones_stay(folder, compilations):
    nvrtc.compile(source())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@needs_owners
@pytest.mark.parametrize("mode", [0o622, 0o620, 0o602])
def test_file_that_others_may_write_is_not_read(folder, compilations, mode):
    nvrtc.compile(source())
    (path,) = files(folder)
    path.chmod(mode)
    compile_afresh(source())
    assert len(compilations) == 2


@needs_owners
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_folder_that_others_may_write_is_neither_read_nor_written(folder, compilations, mode):
    nvrtc.compile(source())
    folder.chmod(mode)
    compile_afresh(source())
    compile_afresh(source(43))
    assert len(compilations) == 3
    assert len(files(folder)) == 1
    for reason in (nvrtc.not_kept(), nvrtc.cache_problem()):
        assert reason == f"{folder} belongs to another user, or others may write to it"


@needs_owners
def test_file_or_folder_of_another_user_is_refused(folder, compilations, monkeypatch):
    nvrtc.compile(source())
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    # The superuser's files are trusted, so the test needs a user id of its own where it runs as root.
    if me == 0:
        for path in (*files(folder), folder):
            os.chown(path, 12345, 12345)
    compile_afresh(source())
    assert len(compilations) == 2
    assert len(files(folder)) == 1


@needs_owners
def test_symbolic_link_and_pipe_are_not_followed(folder, compilations, tmp_path):
    nvrtc.compile(source())
    (path,) = files(folder)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    compile_afresh(source())
    assert len(compilations) == 2
    path.unlink()
    os.mkfifo(path)
    compile_afresh(source())  # would hang, if it waited for somebody to write
    assert len(compilations) == 3


@needs_owners
@pytest.mark.parametrize("obstacle", ["a file in its place", "no folder at all", "another's home", "full disk"])
def test_cache_that_cannot_be_written_costs_a_compilation_only(folder, compilations, monkeypatch, obstacle):
    assert nvrtc.compile(source(0)).cubin and nvrtc.not_kept() is None
    compilations.clear()
    if obstacle == "a file in its place":
        shutil.rmtree(folder)
        folder.write_text("")
    elif obstacle == "no folder at all":
        monkeypatch.setenv(nvrtc.CACHE_VARIABLE, "")
    elif obstacle == "another's home":
        # As for who may not look into the folder above, which a superuser always may.
        for name in ("stat", "open", "mkdir"):
            allowed = getattr(os, name)

            def refused(path, *args, allowed=allowed, **kwargs):
                if str(path).startswith(str(folder)):
                    raise PermissionError(13, "Permission denied", str(path))
                return allowed(path, *args, **kwargs)

            monkeypatch.setattr(os, name, refused)
    else:

        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
    for times in (1, 2):
        assert compile_afresh(source()).cubin
        assert len(compilations) == times
        words = {
            "a file in its place": "Not a directory",
            "no folder at all": "is set to nothing",
            "another's home": "Permission denied",
        }
        assert words.get(obstacle, "No space left on device") in nvrtc.not_kept()
        assert words.get(obstacle, "") in (nvrtc.cache_problem() or "")
    if obstacle == "full disk":
        assert len(files(folder)) == 1


@needs_owners
def test_read_only_folder_is_read(folder, compilations):
    stored = nvrtc.compile(source())
    folder.chmod(0o500)
    try:
        assert compile_afresh(source()) == stored
        assert compile_afresh(source(43)).cubin
    finally:
        folder.chmod(0o700)
    assert len(compilations) == 2


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, "/somewhere")
    assert str(nvrtc.cache_folder()) == "/somewhere"
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, "")
    assert nvrtc.cache_folder() is None
    monkeypatch.delenv(nvrtc.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(nvrtc.cache_folder()) == "/xdg/torch_flashbackend"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert nvrtc.cache_folder() == tmp_path / ".cache" / "torch_flashbackend"
    monkeypatch.setenv(nvrtc.CACHE_VARIABLE, "~/kernels")
    assert nvrtc.cache_folder() == tmp_path / "kernels"


def test_threads_that_want_one_binary_compile_it_once(folder, compilations, monkeypatch):
    run, inside = nvrtc._run_nvrtc, threading.Event()

    def slow(source):
        inside.wait(10)
        return run(source)

    monkeypatch.setattr(nvrtc, "_run_nvrtc", slow)
    results = []
    threads = [threading.Thread(target=lambda: results.append(nvrtc.compile(source()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    inside.set()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(result is results[0] for result in results)
    assert compilations == ["answer"]


CHILD = """
import hashlib, os, sys
from torch_flashbackend import nvrtc
nvrtc._run_nvrtc = lambda source: (hashlib.sha256(source.text.encode()).digest() * 20000, "log")
nvrtc.version = lambda: "13.0"
nvrtc.unavailable = lambda: None
for turn in range(30):
    for answer in range(4):
        nvrtc.forget()
        binary = nvrtc.compile(nvrtc.Source("k", f"{answer}"))
        assert binary.cubin == hashlib.sha256(f"{answer}".encode()).digest() * 20000, "mixed up"
        if (turn + answer) % 3 == int(sys.argv[1]) % 3:  # and again, from nothing
            for path in nvrtc.cache_folder().glob("k-*"):
                path.unlink(missing_ok=True)
"""


@needs_owners
def test_processes_share_a_cache_while_files_come_and_go(folder):
    children = [subprocess.Popen([sys.executable, "-c", CHILD, str(i)], env=os.environ) for i in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    assert not list(folder.glob(".k-*"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_lock_that_is_held_at_a_fork_does_not_block_the_child(folder, compilations):
    key = source().key("13.0")
    lock = nvrtc._building.setdefault(key, threading.Lock())
    with lock, driver._lock:
        child = os.fork()
        if child == 0:
            free = driver._lock.acquire(timeout=5)
            os._exit(0 if free and nvrtc.compile(source()).cubin else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -------------------------------------------------------------------------------------------------------- the compiler


@needs_compiler
def test_compiles_for_hopper_without_a_gpu(folder):
    binary = nvrtc.compile(source())
    assert binary.cubin[:4] == b"\x7fELF"
    assert b"answer" in binary.cubin
    assert "registers" in binary.log
    assert compile_afresh(source()) == binary
    assert nvrtc.compile(source(), use_cache=False).cubin[:4] == b"\x7fELF"


@needs_compiler
def test_compile_error_has_the_compilers_words(folder):
    with pytest.raises(CompileError, match=r'(?s)answer does not compile.*identifier "ANSWER" is undefined'):
        nvrtc.compile(SOURCE._replace(headers={"answer.cuh": ""}))
    assert not folder.exists() or not files(folder)


def test_missing_compiler_is_named(folder, monkeypatch):
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "the package cuda-bindings is not installed")
    with pytest.raises(CompileError, match="cuda-bindings is not installed"):
        nvrtc.compile(source())


def test_reason_for_a_missing_package(monkeypatch):
    nvrtc.unavailable.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: None)
    try:
        assert "cuda-bindings is not installed" in nvrtc.unavailable()
    finally:
        nvrtc.unavailable.cache_clear()


def test_importing_the_plugin_loads_no_cuda_bindings():
    code = "import sys, torch, torch_flashbackend.nvrtc, torch_flashbackend.driver; "
    code += "sys.exit(any(name.startswith('cuda.bindings') for name in sys.modules))"
    # torch itself may load it: what counts is that we do not.
    before = "import sys, torch; sys.exit(any(name.startswith('cuda.bindings') for name in sys.modules))"
    run = lambda text: subprocess.run([sys.executable, "-c", text]).returncode  # noqa: E731
    assert run(code) == run(before)


# ---------------------------------------------------------------------------------------------------------- the driver


class FakeDriver:
    """Stands for libcuda: remembers calls, fails where it is told to."""

    def __init__(self):
        self.calls = []
        self.encodings = []
        self.failures = {}
        self.context = 1

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append(name)
            if self.failures.get(name):
                return self.failures[name].pop(0)
            return getattr(self, f"do_{name}", lambda *_: 0)(*arguments)

        return call

    def do_cuCtxGetCurrent(self, context):
        context._obj.value = self.context
        return 0

    def do_cuCtxSetCurrent(self, context):
        self.context = 1
        return 0

    def do_cuModuleGetFunction(self, function, module, name):
        function._obj.value = 4000 + len(self.calls)
        return 0

    def do_cuMemAlloc_v2(self, memory, size):
        self.allocated = size.value
        memory._obj.value = 1 << (40 + self.calls.count("cuMemAlloc_v2"))
        return 0

    def do_cuTensorMapEncodeTiled(self, memory, *arguments):
        address = memory.value
        assert address % 64 == 0
        self.encodings.append([getattr(a, "value", None) if not hasattr(a, "__len__") else list(a) for a in arguments])
        ctypes.memset(address, 0x5A, 128)
        return 0

    def do_cuTensorMapReplaceAddress(self, memory, pointer):
        assert memory.value % 64 == 0
        ctypes.c_uint64.from_address(memory.value).value = pointer.value
        return 0

    def do_cuLaunchKernelEx(self, config, function, arguments, extra):
        self.config = driver.LaunchConfig.from_buffer_copy(config._obj)
        self.function = function.value
        self.arguments = arguments.value
        return 0


def install_fake_driver(monkeypatch, fake):
    """No GPU and no driver: device 0, stream 77, and what the fake answers."""
    monkeypatch.setattr(driver, "_library", lambda: fake)
    monkeypatch.setattr(driver, "_launcher", None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    for cache in ("_functions", "_of_stream", "_unused", "_lanes", "_num_lanes", "_clusters"):
        monkeypatch.setattr(driver, cache, {})
    monkeypatch.setattr(sources, "_binaries", {})
    monkeypatch.setattr(driver, "_is_capturing", lambda: False)
    monkeypatch.setattr(driver, "current_device", lambda: 0)
    monkeypatch.setattr(driver, "current_stream", lambda index: 77)


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeDriver()
    install_fake_driver(monkeypatch, fake)
    return fake


def test_function_is_loaded_once_for_each_device(cuda):
    binary = Binary("key", b"\x7fELF", "")
    first = driver.load_function(binary, "answer", 0, 100_000)
    assert driver.load_function(binary, "answer", 0, 100_000) == first
    assert cuda.calls.count("cuModuleLoadData") == 1
    assert driver.load_function(binary, "answer", 1, 100_000) != first
    assert driver.load_function(Binary("other", b"\x7fELF", ""), "answer", 0, 100_000) != first
    assert cuda.calls.count("cuModuleLoadData") == 3
    # A thread that captures a graph may load: it says that it allocates, before, and takes that back.
    assert cuda.calls.count("cuThreadExchangeStreamCaptureMode") == 6


def test_failures_of_the_driver(cuda):
    binary = Binary("key", b"\x7fELF", "")
    cuda.failures["cuModuleLoadData"] = [209, 2]
    with pytest.raises(driver.DriverError, match="cuModuleLoadData failed: CUresult 209"):
        driver.load_function(binary, "answer", 0, 100)
    with pytest.raises(torch.OutOfMemoryError):
        driver.load_function(binary, "answer", 0, 100)
    assert driver.load_function(binary, "answer", 0, 100)


def test_thread_without_context_gets_one_and_launches_again(cuda):
    cuda.context = 0
    cuda.failures["cuLaunchKernelEx"] = [201]
    config = driver.LaunchConfig((3, 1, 1), (384, 1, 1), 1000)
    driver.launch(config, ctypes.c_void_p(5), ctypes.c_void_p(6), 0, 77)
    assert cuda.calls.count("cuLaunchKernelEx") == 2
    assert "cuCtxSetCurrent" in cuda.calls
    assert (cuda.function, cuda.arguments, cuda.config.stream) == (5, 6, 77)
    assert (list(cuda.config.grid), list(cuda.config.block), cuda.config.shared_bytes) == ([3, 1, 1], [384, 1, 1], 1000)
    cuda.failures["cuLaunchKernelEx"] = [1]
    with pytest.raises(driver.DriverError, match="cuLaunchKernelEx"):
        driver.launch(config, ctypes.c_void_p(5), ctypes.c_void_p(6), 0, 77)


def test_tensor_map_describes_the_tensor(cuda):
    shape, stride = (2, 3, 100, 40), (12_000, 40, 120, 1)
    driver.TensorMaps(torch.bfloat16, shape, stride, 128, 1 << 20, 0)
    dtype, rank, pointer, dims, strides, box, steps, *modes = cuda.encodings[-1]
    assert (dtype, rank, pointer) == (9, 4, 1 << 20)
    assert dims == [40, 100, 3, 2]
    assert strides == [240, 80, 24_000]  # bytes: rows, heads, batches
    assert (box, steps) == ([64, 128, 1, 1], [1, 1, 1, 1])
    assert modes == [0, 3, 3, 0]
    driver.TensorMaps(torch.float16, (1, 1, 1, 8), (3, 5, 7, 1), 64, 1 << 20, 0)
    assert cuda.encodings[-1][0] == 6
    assert cuda.encodings[-1][4] == [16, 16, 16]


def test_tensor_maps_are_kept_by_address_and_do_not_grow_without_bound(cuda):
    maps = driver.TensorMaps(torch.float16, (1, 1, 64, 64), (4096, 4096, 64, 1), 64, 16, 0)
    address, _ = maps.get(1 << 20)
    assert address % 64 == 0
    assert ctypes.c_uint64.from_address(address).value == 1 << 20
    assert ctypes.string_at(address + 8, 120) == b"\x5a" * 120
    assert maps.get(1 << 20)[0] == address
    assert cuda.calls.count("cuTensorMapReplaceAddress") == 1
    for step in range(3 * maps.CAPACITY):
        found, _ = maps.get((step + 1) << 12)
        assert ctypes.c_uint64.from_address(found).value == (step + 1) << 12
    assert len(maps._maps) == maps.CAPACITY


def test_counters_are_shared_by_a_stream_and_by_nothing_else(cuda, monkeypatch):
    first = driver.counters(0, 77)
    assert driver.counters(0, 77) == first
    assert driver.counters(0, 78) not in (first, driver.counters(1, 77))
    assert cuda.calls.count("cuMemAlloc_v2") == cuda.calls.count("cuMemsetD8Async") == 2  # one block for each device
    # What is captured may run beside everything else: each launch has its own.
    monkeypatch.setattr(driver, "_is_capturing", lambda: True)
    captured = [driver.counters(0, 77) for _ in range(5000)]
    assert len({*captured, first}) == 5001
    assert all(address % 32 == 0 for address in captured)
    monkeypatch.setattr(driver, "_is_capturing", lambda: False)
    assert driver.counters(0, 77) == first
    assert cuda.calls.count("cuMemAlloc_v2") == 4


def test_the_per_thread_default_stream_is_another_one_in_each_thread(cuda):
    found = [driver.counters(0, 2)]
    thread = threading.Thread(target=lambda: found.append(driver.counters(0, 2)))
    thread.start()
    thread.join()
    assert len(set(found)) == 2
    assert driver.counters(0, 2) == found[0]
