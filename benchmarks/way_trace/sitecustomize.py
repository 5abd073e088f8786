"""Records the calls of kcoord's own functions in this process, from its start: Python imports this module, from PYTHONPATH.

The agent's periodic work is left out: a busy machine lets more of it into a claim's interval.

``WAY_TRACE``: the directory of the traces. Once it holds a file ``stop``, each process writes ``PID.json`` into it: the calls
(monotonic seconds, thread, function), the functions, the opens of the artifact's file and the sizes of what was hashed.
"""

import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path

_WHERE = os.environ.get("WAY_TRACE", "")
_NAME = "way.bin"  # the artifact's file
_ROOT = Path(__file__).resolve().parents[2]  # a clone's directory may be called kcoord, too
_ROOMS = (f"{_ROOT}/kcoord/", f"{_ROOT}/launch/kcoord_launch/")
_CHORES = f"{_ROOT}/kcoord/agent/chores/chore.py"
_calls: list = []
_numbers: dict = {}
_opens: list = []
_hashed: list = []


def _record(frame, event, argument):
    if event == "call":
        code = frame.f_code
        number = _numbers.get(code)
        if number is None:
            own = code.co_filename.startswith(_ROOMS) and code.co_name not in _INNER
            number = _numbers[code] = len(_numbers) if own else -1
        if number >= 0 and not _is_periodic(frame):
            _calls.append((time.monotonic(), threading.get_ident(), number))


def _is_periodic(frame):
    """True within the agent's pulse, and within a chore or its thread."""
    if threading.current_thread().name.startswith("chore "):
        return True
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_pulse" or code.co_filename == _CHORES:
            return True
        frame = frame.f_back
    return False


_INNER = ("<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


def _audit(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        name = os.fsdecode(arguments[0]).rpartition("/")[2]
        if name == _NAME and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY):
            _opens.append(time.monotonic())


class _Hash:
    """SHA-256 that notes how much it is given."""

    def __init__(self, data=b"", *, native=hashlib.sha256, **keywords):
        self._native = native(data, **keywords)
        self.digest, self.hexdigest = self._native.digest, self._native.hexdigest
        self.digest_size, self.block_size, self.name = 32, 64, "sha256"
        _hashed.append((time.monotonic(), len(data)))

    def update(self, data):
        self._native.update(data)
        _hashed.append((time.monotonic(), len(data)))


def _await_stop():
    sys.setprofile(None)
    while not Path(_WHERE, "stop").exists():
        time.sleep(0.05)
    functions = {number: _described(code) for code, number in _numbers.items() if number >= 0}
    told = {"calls": _calls, "functions": functions, "opens": _opens, "hashed": _hashed}
    part = Path(_WHERE, f"{os.getpid()}.part")
    part.write_text(json.dumps(told))
    part.rename(part.with_suffix(".json"))


def _described(code):
    lines = [line for *_, line in code.co_lines() if line is not None]
    return [code.co_filename, code.co_qualname if hasattr(code, "co_qualname") else code.co_name, code.co_firstlineno,
            max(lines, default=0) - code.co_firstlineno + 1]  # fmt: skip


def _begin():
    _calls.clear()
    thread = threading.Thread(target=_await_stop, daemon=True, name="way-trace")
    thread.start()


if _WHERE:
    hashlib.sha256 = _Hash
    sys.addaudithook(_audit)
    threading.setprofile(_record)
    _begin()
    os.register_at_fork(after_in_child=_begin)  # an agent that becomes a daemon
    sys.setprofile(_record)
