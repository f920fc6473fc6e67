"""Mutations of configurations, schemas, run folders and checkpoint indexes, and checks of the outcome.

Each case runs the real command line in this process until Ray would start. The command must return a result
or print one raytrec error within the time and size limits, without a traceback or a secret. It must not write
outside of its folder.
"""

import contextlib
import faulthandler
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import time
from copy import deepcopy
from pathlib import Path

import parquet
import recorded_run
import yaml
from hypothesis import strategies as st

TIME_LIMIT_S, MAX_OUTPUT_BYTES = 10, 4096
SECRET = "hunter2-sesame"
NESTING_DEPTH = 3000
BILLION_LAUGHS = "a: &a [lol,lol,lol,lol,lol,lol,lol,lol,lol]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n" for i in range(9)
)
FILE_REPLACEMENTS = (  # replace a whole file
    b"",
    b"[1,2]",
    b"checkpoint: 5",
    b"5",
    b"null",
    b"'",
    b"\xff\xfe\x00\x01binary\x00",
    b"\x00" * 100,
    BILLION_LAUGHS.encode(),
    b"[" * NESTING_DEPTH,
    b"[" * NESTING_DEPTH + b"]" * NESTING_DEPTH,
    b"{" * NESTING_DEPTH,
    b"- " * NESTING_DEPTH + b"a",
    b'{"a":' * NESTING_DEPTH + b"1" + b"}" * NESTING_DEPTH,
    b"a: &a {b: *a}",
    b"a: 1\n---\nb: 2",
    b"{a: 1, a: 2}",
    b"!!python/object/apply:os.system [true]",
    b"2001-99-99",
    b"x" * 300_000,
    b"{" + b",".join(b"k%d: 1" % i for i in range(20_000)) + b"}",
    b"9" * 6000,
)
INSERTED_PIECES = (  # are inserted into a file
    *("&a ", "*a", "<<: *a", "[", "{", "]", "}", ": ", "- ", "? ", "|", ">", "~", "#", "@", "`", "é", "  "),
    *("!!int ", "!!python/name:os.system ", "\x00", "\t", "\x1b]0;x\x07", "\u202e", "'", '"', "\n"),
    *("---\n", "...\n", "%YAML 9.9\n", "run: {}\n", "data: {}\n", '"\\ud800"', "\\u0000"),
    *("[" * NESTING_DEPTH, "9" * 5000, "NaN", "1e999"),
)
EDGE_NUMBERS = (
    *(0, -1, 1, 2**31, 2**53 + 1, 10**20, -(10**20), 10**400),
    *(0.5, -0.0, 1e308, 1e-320, float("inf"), float("-inf"), float("nan")),
)
EDGE_TEXTS = (
    *("", " ", ".", "..", "../../x", "/x\x00y", "[/x]", "[bold]", "x" * 5000, "*", "[", "a\nb", "\x1b[31m"),
    *("\u202ex", "é" * 300, "~no-such-user/x", "no", "1e-3", "null", "user"),
    *("file:///nowhere", "http://x", "nowhere://y", "://", "my.module:Model", "os:system", ":", "a:b:c"),
    f"http://me:{SECRET}@h",
    f"nowhere://a:{SECRET}/@h/x?sig={SECRET}",
    f"postgresql://u:{SECRET}@/db",
)
NESTED_VALUES = (
    *([], {}, [[]], [None], {"": None}, [1, 2], ["a", "b"], {"name": "two_tower"}, {"a": {"b": {"c": 1}}}),
    *([0] * 3000, {f"k{i}": i for i in range(300)}, ["x" * 1000] * 20, [[[[[[1]]]]]], {"password": SECRET}),
)
MUTATED_VALUES = st.one_of(
    st.sampled_from([None, True, False, *EDGE_NUMBERS, *EDGE_TEXTS, *NESTED_VALUES]),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(-2, 2**40), max_size=4),
)


class RayStartReached(BaseException):
    """Raised at the point where the command would start Ray."""


class TimeLimitExceeded(BaseException):
    """Raised by the watchdog."""


def iterate_paths(values, path=()):
    """Yield the path of every nested value."""
    if path:
        yield path
    inner = values.items() if isinstance(values, dict) else enumerate(values if isinstance(values, list) else [])
    for key, each in inner:
        yield from iterate_paths(each, (*path, key))


@st.composite
def draw_changed_values(draw, values):
    """Replace, remove, rename or add one to three of the nested values."""
    values = json.loads(json.dumps(values))
    for _ in range(draw(st.integers(1, 3))):
        found = list(iterate_paths(values))
        if not found:
            return deepcopy(draw(MUTATED_VALUES))
        *path, last = draw(st.sampled_from(found))
        holder = values
        for key in path:
            holder = holder[key]
        what = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "add"]))
        if what == "replace":
            holder[last] = deepcopy(draw(MUTATED_VALUES))
        elif what == "remove":
            holder.pop(last)
        elif isinstance(holder, dict):
            name = draw(st.one_of(st.text(max_size=8), st.sampled_from([f"{last}s", str(last)[::-1], SECRET[:5]])))
            holder[name] = holder.pop(last) if what == "rename" else deepcopy(draw(MUTATED_VALUES))
        else:
            holder.append(deepcopy(draw(MUTATED_VALUES)))
    return values


@st.composite
def draw_changed_bytes(draw, text):
    """Cut, insert, repeat or flip bytes of a file, or replace all of them."""
    data = text.encode() if isinstance(text, str) else text
    what = draw(st.sampled_from(["whole", "cut", "put", "put", "repeat", "flip", "line"]))
    if what == "whole" or not data:
        return draw(st.one_of(st.sampled_from(FILE_REPLACEMENTS), st.binary(max_size=60)))
    begin, end = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
    if what == "cut":
        return data[:begin] + data[end:]
    if what == "put":
        return data[:begin] + draw(st.sampled_from(INSERTED_PIECES)).encode(errors="surrogatepass") + data[begin:]
    if what == "repeat":
        return data[:end] + data[begin:end] + data[end:]
    if what == "line":
        return data + draw(st.sampled_from(data.splitlines(keepends=True)))
    at = min(begin, len(data) - 1)
    return data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]


def dump_yaml(values):
    """Return the values as the bytes of a YAML file."""
    return yaml.safe_dump(values, allow_unicode=True).encode(errors="replace")


def replace_by_kind(path, kind):
    """Replace a file by something that is not a regular file."""
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
            made.bind(path.name)
    elif kind in ("circle", "zero", "nothing"):
        path.symlink_to({"circle": path.name, "zero": "/dev/zero", "nothing": "/nowhere/x"}[kind])


NON_FILE_KINDS = ("pipe", "folder", "socket", "circle", "zero", "nothing", "gone")


class MutationFolder:
    """Deeply nested folder with data, a configuration and a run, restored for each case."""

    def __init__(self, folder):
        self.outer = Path(folder) / "outer"
        self.work, self.kept = self.outer / "a/b/c/work", Path(folder) / "kept"
        parquet.write_dataset(self.kept / "data", train=300, valid=60, test=60)
        self.work.parent.mkdir(parents=True)
        self._fill()
        recorded_run.make_run_folder(self.work / "run", self.work / "data")
        shutil.copytree(self.work / "run", self.kept / "run")
        (self.work / "config.yaml").write_text(yaml.safe_dump(self.config()))
        (self.kept / "config.yaml").write_bytes((self.work / "config.yaml").read_bytes())

    def config(self):
        """Return a valid training configuration."""
        values = recorded_run.make_settings(self.work / "run", self.work / "data")
        values["data"]["reserve_columns"], values["eval"] = ["user", "row"], {"slices": ["user"]}
        first = {"label": "label", "nulls": "skip", "sample_weight": "row", "group": "user", "item": "row"}
        second = {"name": "again", "label": "label", "loss": "mse", "mask": "label"}
        return values | {"tasks": [first, second]}

    @contextlib.contextmanager
    def fresh(self):
        """Restore the folder and make it the working directory."""
        self._fill()
        with contextlib.chdir(self.work):
            yield self.work

    def _fill(self):
        if self.work.exists():
            with contextlib.suppress(OSError):
                shutil.rmtree(self.work)
        shutil.copytree(self.kept, self.work)

    def outside(self):
        """Return all paths outside the working directory."""
        return {str(p) for p in self.outer.rglob("*") if self.work not in (p, *p.parents)}


def update_index_hash(text):
    """Return the index with its correct hash, or unchanged if it is not a valid index."""
    try:
        index = json.loads(text)
        index.pop("sha256", None)
        content = json.dumps(index, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        index["sha256"] = hashlib.sha256(content).hexdigest()
        return json.dumps(index).encode()
    except (ValueError, AttributeError, RecursionError):
        return text.encode()


def run_command(*arguments):
    """Run the command line; return stderr and the exit code, None if Ray would be started."""
    from raytrec.cli import main

    return run_with_watchdog(lambda: main([str(a) for a in arguments]), arguments)


def run_with_watchdog(call, what):
    """Call a function under the watchdog, check its output and return stderr and the exit code."""
    from raytrec.common.errors import RaytrecError

    out, said, code = io.StringIO(), io.StringIO(), 0
    before = signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
    faulthandler.dump_traceback_later(3 * TIME_LIMIT_S, exit=True)  # for calls that no signal interrupts
    began = time.monotonic()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            call()
    except RayStartReached:
        code = None
    except SystemExit as ended:
        code = ended.code
    except RaytrecError as error:  # from calls without the command line
        said.write(f"error: {error}\n")
        code = 1
    except TimeLimitExceeded:
        raise AssertionError(f"{what}: hangs for more than {TIME_LIMIT_S} s") from None
    except BaseException as error:
        raise AssertionError(f"{what}: a traceback: {type(error).__name__}: {str(error)[:300]}") from error
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    text = said.getvalue()
    assert code in (None, 0, 1, 2), f"{what}: exit code {code}"
    assert (code == 1) <= ("error: " in text), f"{what}: fails without a message: {text[:300]}"
    assert "Traceback (most" not in text, f"{what}: {text[:1000]}"
    size = len(text.encode(errors="surrogatepass"))
    assert size <= MAX_OUTPUT_BYTES, f"{what}: {size} bytes after {time.monotonic() - began:.1f} s: {text[:500]}"
    assert not any(c < " " and c not in "\n\t" for c in text), f"{what}: control characters: {text[:300]!r}"
    assert SECRET not in text + out.getvalue(), f"{what}: shows a secret: {text[:500]}"
    return text, code


def _too_long(*_):
    raise TimeLimitExceeded
