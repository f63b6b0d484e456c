"""Runs scripts in forks of a process that has their imports already: `python server.py MODULE ...`.

An import of vLLM takes half a minute of a small machine. Each line of standard input is a JSON list: the log, the
script and its arguments. Each line of standard output is the process id of the fork that runs it, then, when it has
ended, that id with its exit status. A fork is its own process group. What imports print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
import threading
import traceback

ANSWERS = os.dup(1)
"""Standard output as this process was given it."""


def child(log: str, script: str, arguments: list[str]) -> int:
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  the log has it, and the exit status says that there was one
        traceback.print_exc()
        return 1
    return 0


def say(*words: int) -> None:
    os.write(ANSWERS, (" ".join(map(str, words)) + "\n").encode())


def wait(pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    say(pid, os.waitstatus_to_exitcode(status))


def main() -> None:
    os.dup2(2, 1)  # vLLM logs to standard output
    for name in sys.argv[1:]:
        if name == "eagle3compat":
            importlib.import_module(name).apply()
        importlib.import_module(name)
    say(0, 0)
    for line in sys.stdin:
        log, script, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = child(log, script, arguments)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        say(pid)
        threading.Thread(target=wait, args=(pid,), daemon=True).start()


if __name__ == "__main__":
    main()
