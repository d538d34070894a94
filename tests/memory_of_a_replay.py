"""Loads and replays traces (small, large, compact), and prints how many megabytes of its own the process held at most."""

import json
import sys
import threading
import warnings
from pathlib import Path

import moecache as mc

warnings.simplefilter("ignore", UserWarning)


def own_megabytes():
    """Anonymous memory: pages of a mapped file are not counted, the system takes them back when it needs them."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def most_while(work):
    """The growth of the process's own memory while it works, looked at every few milliseconds."""
    before = own_megabytes()
    most, is_done = [before], threading.Event()

    def watch():
        while not is_done.wait(0.002):
            most.append(own_megabytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = work()
    is_done.set()
    watcher.join()
    most.append(own_megabytes())
    del result
    return max(most) - before


def replay(path, memory_map):
    trace = mc.load_trace(path, memory_map=memory_map)
    return trace, [mc.simulate(trace, policy, 128, keep="summary") for policy in (mc.QUALITY_FIRST, mc.FETCH_EVERY_MISS)]


small, large, compact = sys.argv[1:]
for memory_map in (False, True):
    replay(small, memory_map)  # everything is compiled and loaded
print(json.dumps({
    "large, mapped": most_while(lambda: replay(large, True)),
    "compact, mapped": most_while(lambda: replay(compact, True)),
    "large, read": most_while(lambda: replay(large, False)),
}))  # fmt: skip
