"""Processes side by side, one core each; they end when the process that started them does, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from expunge.errors import RequestError


@dataclass(frozen=True)
class Workers:
    """How to have work done: ``submit`` it, at most ``count`` pieces at a time."""

    submit: Callable[[Callable[[], Any]], Future[Any]]
    count: int


@contextmanager
def side_by_side(count: int | None = None) -> Iterator[Workers]:
    """A pool of processes with a core each; None takes one a core, at most four."""
    cores = os.cpu_count() or 1
    if count is not None and count < 1:
        raise RequestError(f"At least 1 process is needed, not {count}.")
    count = min(count or 4, cores)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(os.getpid(),)) as pool:
        try:
            yield Workers(pool.submit, count)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def one_by_one() -> Iterator[Workers]:
    """Everything in this process: a GPU is not left waiting for a new process's first touch."""

    def submit(work: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work())
        except Exception as problem:
            done.set_exception(problem)
        return done

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a process of the pool, so that times can be compared
    try:
        yield Workers(submit, 1)
    finally:
        torch.set_num_threads(threads)


def processes(count: int | None, device: str) -> AbstractContextManager[Workers]:
    """So many processes; where nobody says how many, one a core, and on a GPU this one alone.

    Several share a GPU well only under its multi-process service (NVIDIA MPS), and their seconds are then nobody's.
    """
    alone = count == 1 or (count is None and device != "cpu")
    return one_by_one() if alone else side_by_side(count)


def _begin(parent: int) -> None:
    """One thread each: more would take turns with the other workers. No orphans: a killed parent says no goodbye."""
    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
