"""A scripted server in the place of `prime_hpc.inference.main`, with its command line (see `scripted_engines`).

It answers reverse-text, or as the function that `$SCRIPTED_REPLIES` names (`module:function`) says.
"""

import argparse
import importlib
import os
import signal
import sys
import threading
from pathlib import Path

from prime_hpc.config import load_run
from tests.support.scripted_server import AdminServer, Script, reverse_last_user


def script() -> Script:
    """Return the function that answers."""
    module, _, name = os.environ.get("SCRIPTED_REPLIES", "").partition(":")
    return getattr(importlib.import_module(module), name) if module else reverse_last_user


def main(argv: list[str]) -> None:
    """Serve until SIGINT or SIGTERM."""
    from transformers import PreTrainedTokenizerFast

    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--host", default="127.0.0.1")
    known, _ = parser.parse_known_args(argv)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(load_run(known.run_dir).model.name)
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    server = AdminServer(tokenizer, script(), port=known.port)
    server.host = None if known.host == "::" else known.host  # all addresses, IPv4 as well
    with server:
        print(f"scripted server on {known.host}:{known.port}", file=sys.stderr, flush=True)
        over.wait()
