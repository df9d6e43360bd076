"""A server that spawns an engine, which spawns a worker, as vLLM does on CUDA: prints the three ids."""

import multiprocessing
import os
import time
from multiprocessing.connection import Connection

from prime_hpc.inference import server_process


def worker(pipe: Connection) -> None:
    pipe.send(os.getpid())
    time.sleep(600)


def engine(pipe: Connection) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=worker, args=(there,)).start()
    pipe.send((os.getpid(), here.recv()))
    time.sleep(600)


if __name__ == "__mp_main__":
    server_process.die_with_spawner()

if __name__ == "__main__":
    server_process.die_with_parent()
    spawn = multiprocessing.get_context("spawn")
    mine, its = spawn.Pipe()
    spawn.Process(target=engine, args=(its,)).start()
    print(os.getpid(), *mine.recv(), flush=True)
    time.sleep(600)
