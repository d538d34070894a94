"""Start a command inside a memory cgroup, wait for it, and tell how it ended and how much memory it had at most.

This is a program of its own, run by `moecache.experiments.memory_cap` and free of imports that take memory. It stays outside the cgroup.
The peak of resident memory that the system keeps of a process is inherited through a fork: a command started straight from a large
process would be given that process's peak. From here it is given at most a bare interpreter's.

    capped_child.py REPORT PROCS COMMAND ...

REPORT is an open file descriptor, PROCS the file that puts a process into the cgroup ("" for none).
"""

import os
import sys


def main() -> None:
    """Run the command, then write its wait status and its peak in bytes to the descriptor."""
    report, procs, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    child = os.fork()
    if child == 0:
        _become(procs, command, report)
    _, status, usage = os.wait4(child, 0)
    os.write(report, f"{status} {usage.ru_maxrss * 1024}".encode())


def _become(procs: str, command: list[str], report: int) -> None:
    os.set_inheritable(report, False)
    try:
        if procs:
            with open(procs, "w") as file:
                file.write(str(os.getpid()))
        os.execvp(command[0], command)
    except OSError as fault:
        os.write(2, f"{command[0]} could not be started: {fault}\n".encode())
    finally:
        os._exit(127)


if __name__ == "__main__":
    main()
