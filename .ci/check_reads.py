"""Find places that open a file in another way than `megatron/base/outside_file.py`.

Run `python .ci/check_reads.py` from the repository's root. It prints each place and exits with 1 if
there is one. A file that a command line or a folder names may be a FIFO, a device or a huge file,
so it is opened by that module only. `ALLOWED` names the other places, with the reason.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

READER = Path("megatron/base/outside_file.py")
FUNCTIONS = {
    *("open", "io.open", "codecs.open", "os.open", "gzip.open", "bz2.open", "lzma.open"),
    *("tarfile.open", "zipfile.ZipFile", "zipfile.is_zipfile", "json.load", "pickle.load"),
    *("tomllib.load", "yaml.load", "yaml.safe_load", "np.load", "np.memmap", "np.fromfile"),
    *("np.loadtxt", "np.genfromtxt", "torch.load", "safe_open", "load_file", "pa.memory_map"),
    *("pa.OSFile", "parquet.ParquetFile", "shutil.copyfile", "shutil.copy", "shutil.copy2"),
    *("filecmp.cmp", "runpy.run_path", "sqlite3.connect"),
}
"""Functions that open a file which their first argument names."""
METHODS = {"read_text", "read_bytes", "from_file", "from_pretrained"}
"""Methods of a path or of a library's class that do."""
_OF_TEXT = {"encoding", "errors", "newline", "buffering"}
"""Arguments of `Path.open` that other methods of this name do not have."""
_OWN = "a file of the package or of this process"
_CHECKED = "the same function has called check_regular, or open_regular, or has compared its status"
_WRITES = "opens the file to write, and does not follow a link or wait for a FIFO"
_KERNEL = "a file of the kernel"
ALLOWED = {
    "megatron/base/durable.py": ("os.open", "open", _WRITES),
    "megatron/base/file_lock.py": ("read_text", _KERNEL),
    "megatron/base/host_limits.py": ("read_text", _KERNEL),
    "megatron/base/code_version.py": ("open", _OWN),
    "megatron/checkpoint/lease.py": ("read_text", _KERNEL),
    "megatron/config/presets.py": ("read_text", _OWN),
    "megatron/data/building.py": ("os.open", _WRITES),
    "megatron/data/cache.py": ("os.open", _WRITES),
    "megatron/observe/metrics.py": ("os.open", _WRITES),
    "megatron/parallel/launcher.py": ("read_bytes", _KERNEL),
    "megatron/tokenizer/build.py": ("from_file", "from_pretrained", _CHECKED),
    "megatron/extras/interop/convert/compare.py": (
        "from_pretrained",
        "it is given tensors, and reads no file",
    ),
    "megatron/extras/interop/convert/hf_files.py": ("safe_open", "from_pretrained", _CHECKED),
    "megatron/extras/interop/convert/tokenizer_files.py": ("shutil.copyfile", _CHECKED),
    "megatron/extras/interop/convert/unpickle.py": ("torch.load", "zipfile.is_zipfile", _CHECKED),
    "megatron/extras/interop/convert/writing.py": ("os.open", "opens a folder"),
    "megatron/extras/interop/inspection/verification.py": ("safe_open", _CHECKED),
    "megatron/extras/object_store/store.py": ("os.open", "opens a folder"),
    "megatron/extras/operations/chronicle/page.py": ("read_text", _OWN),
    "megatron/extras/operations/hub/inside.py": ("os.open", "opens a folder"),
    "megatron/extras/operations/rollback/cutting.py": ("filecmp.cmp", _OWN),
    "megatron/extras/operations/slurm/node_probe.py": ("read_bytes", _OWN),
    "megatron/extras/planner/cost/hardware.py": ("read_text", _OWN),
    "megatron/extras/planner/dry_run/process.py": ("read_bytes", _OWN),
    "megatron/extras/planner/ladder/runs.py": ("yaml.safe_load", "it is given a text"),
    "megatron/extras/preparation/conversations/build.py": ("open", _KERNEL),
    "megatron/extras/preparation/preprocess/encoders.py": ("open", _KERNEL),
    "megatron/extras/preparation/preprocess/journal.py": ("open", _WRITES),
    "megatron/extras/preparation/commands/import_tokens.py": ("np.memmap", _CHECKED),
    "megatron/extras/watch/profiler.py": ("open", _OWN),
    "megatron/extras/samples/stream/listing.py": ("np.load", "zipfile.ZipFile", _CHECKED),
    "megatron/extras/samples/stream/table_files.py": (
        "parquet.ParquetFile",
        "pa.memory_map",
        _CHECKED,
    ),
    "megatron/extras/watch/trackers/emissions.py": (
        "open",
        "is_file was called, and it has written it",
    ),
    "megatron/extras/interop/translators/compat.py": ("read_text", _OWN),
    "megatron/extras/planner/verify/recording.py": ("torch.load", _OWN),
    "megatron/extras/planner/verify/verification.py": ("torch.load", _OWN),
}
"""File -> the functions that it may call, and the reason."""


def find_places(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each call that opens a file to read it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            # The base of a method may be any expression. A function of this name has none.
            method = node.func.attr if isinstance(node.func, ast.Attribute) else None
            if method in METHODS:
                yield node.lineno, method
            elif method == "open" and _opens_path(node):
                yield node.lineno, "open"
            elif name in FUNCTIONS and not _only_writes(name, node):
                yield node.lineno, name


def _opens_path(call: ast.Call) -> bool:
    """Return whether a call of a method `open` is that of a path, for reading."""
    if any(word.arg in _OF_TEXT for word in call.keywords):
        return True
    first = call.args[0] if call.args else None
    return isinstance(first, ast.Constant) and first.value in ("r", "rb", "rt")


def _only_writes(name: str, call: ast.Call) -> bool:
    """Return whether a call of `open` or `os.open` cannot read or wait for a FIFO's writer."""
    arguments = [ast.unparse(argument) for argument in (*call.args[1:], *call.keywords)]
    if name == "os.open":
        return bool(arguments) and "O_WRONLY" in arguments[0] and "O_RDWR" not in arguments[0]
    if name == "open" and arguments:
        mode = arguments[0].removeprefix("mode=").strip("'\"")
        return mode.isalpha() and "r" not in mode
    return False


def main() -> int:
    """Print every place and return the exit code."""
    places = []
    files = sorted(path for folder in ("megatron", "tools") for path in Path(folder).rglob("*.py"))
    unused = {(file, name) for file, names in ALLOWED.items() for name in names[:-1]}
    for path in files:
        if path == READER:
            continue
        for line, name in find_places(path):
            unused.discard((str(path), name))
            if name not in ALLOWED.get(str(path), ())[:-1]:
                places.append(
                    f"{path}:{line}: {name} may wait for a FIFO or read without end; use {READER}, "
                    "or name the reason in .ci/check_reads.py"
                )
    places += [f"{file} does not call {name} any more: .ci/check_reads.py" for file, name in unused]
    if places:
        print("\n".join(places))
        return 1
    print(f"{len(files)} files open no file from outside in another way")
    return 0


if __name__ == "__main__":
    sys.exit(main())
