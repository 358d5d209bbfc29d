"""Jobs for the worker tests; workers import them by name."""

import ctypes
import os
import signal
import subprocess
import sys
import time

_kept = {}


def add(a, b):
    return a + b


def process_id():
    return os.getpid()


def keep(name, value):
    _kept[name] = value


def kept(name):
    return _kept[name]


def fail(message):
    raise ValueError(message)


def segfault():
    os.kill(os.getpid(), signal.SIGSEGV)


def read_null():
    ctypes.string_at(0)


def leave(status):
    os._exit(status)


def sleep_forever():
    while True:
        time.sleep(1)


def hang_deaf():
    # Holds the GIL and ignores what can be ignored, as a compiler in an endless loop does.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.PyDLL(None).pause()


def eat_memory():
    hoard = []
    while True:
        hoard.append(bytearray(16 << 20))


def eat_memory_in_a_child():
    subprocess.run([sys.executable, "-c", "x = []\nwhile True: x.append(bytearray(16 << 20))"], check=False)


def ask_for_too_much():
    return bytearray(1 << 62)


def start_sleeper():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def sleep_after_starting_a_sleeper(path):
    with open(path, "w") as file:
        file.write(str(start_sleeper()))
    sleep_forever()


def fork_and_die():
    if os.fork() == 0:
        time.sleep(600)
    os._exit(3)


def say_and_die():
    print("last words", flush=True)
    os.abort()


def return_unpicklable():
    return lambda: None


def jax_dtype():
    import jax.numpy as jnp

    return str(jnp.zeros(2, float).dtype)


def option(name):
    import jax

    return getattr(jax.config, name)
