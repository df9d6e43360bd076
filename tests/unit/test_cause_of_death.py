"""Why a trainer ended: the rank that failed first, not one that lost it."""

from pathlib import Path

import pytest

from prime_hpc.config import ConfigError
from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.store.errors import NoRoom
from prime_hpc.supervisor.roles.process import Role
from prime_hpc.supervisor.roles.spec import RoleSpec

LOST = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:36034"


@pytest.mark.parametrize(
    ("words", "torchruns_first", "expected"),
    [
        ({0: LOST, 1: "StoreError: x: I/O error"}, 0, "trainer rank 1: StoreError: x: I/O error"),
        ({0: "ValueError: bad", 1: LOST}, 1, "trainer rank 0: ValueError: bad"),
        ({0: LOST}, 1, "trainer rank 1 was killed by signal 9"),
        ({0: LOST, 1: LOST}, 1, f"trainer rank 1: {LOST}"),
    ],
)
def test_a_rank_that_lost_another_is_not_the_cause(
    tmp_path: Path, words: dict[int, str], torchruns_first: int, expected: str
) -> None:
    log_dir = RoleContext(role="trainer", run_dir=tmp_path).log_dir
    spec = RoleSpec(name="trainer", command=["true"], start_timeout_s=60.0, num_processes=2)
    role = Role(spec, log_dir, {"PATH": "/usr/bin:/bin"})
    role.start()
    role.reap()
    for rank, text in words.items():
        error = ValueError() if text.startswith("ValueError") else RuntimeError()
        RoleStatus(RoleContext(role="trainer", run_dir=tmp_path, index=rank)).failed(error, f"rank {rank}: {text}")
    code = 1 if torchruns_first in words else -9
    role.log_file.write_text(
        f"Root Cause (first observed failure):\n  rank : {torchruns_first}\n  exitcode  : {code}\n"
    )
    assert role.death() == (expected, "ValueError" in expected, 1)


def test_the_only_rank_of_a_trainer_ended_as_it_did_and_not_as_torchrun(tmp_path: Path) -> None:
    log_dir = RoleContext(role="trainer", run_dir=tmp_path).log_dir
    role = Role(RoleSpec(name="trainer", command=["false"], start_timeout_s=60.0), log_dir, {"PATH": "/usr/bin:/bin"})
    role.start()
    role.reap()
    assert role.death().cause == "trainer ended with exit code 1"
    role.log_file.write_text("Root Cause (first observed failure):\n[0]:\n  rank      : 0\n  exitcode  : -9 (pid: 5)\n")
    assert role.death().cause == "trainer was killed by signal 9"
    role.start()  # again, into the same log
    role.reap()
    assert role.death().cause == "trainer ended with exit code 1"


def test_torchrun_s_own_end_is_not_the_rank_s(tmp_path: Path) -> None:
    log_dir = RoleContext(role="trainer", run_dir=tmp_path).log_dir
    told = "[0]:\\n  rank      : 0\\n  exitcode  : 1 (pid: 5)\\n"
    command = ["sh", "-c", f"printf '{told}'; kill -9 $$"]
    role = Role(RoleSpec(name="trainer", command=command, start_timeout_s=60.0), log_dir, {"PATH": "/usr/bin:/bin"})
    role.start()
    role.reap()
    assert role.death().cause == "trainer was killed by signal 9"


@pytest.mark.parametrize(
    ("words", "became"),
    [
        (
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
            "an engine did not start",
        ),
        ("RuntimeError: an engine process died; see its last lines above", "an engine died"),
    ],
)
@pytest.mark.parametrize("label", ["", "0: ", "0: [n2] "])
def test_a_server_whose_engine_failed_gives_the_engines_reason(
    tmp_path: Path, words: str, became: str, label: str
) -> None:
    """vLLM's server says no more than that the cause stands above; `label` is of other nodes' lines."""
    context = RoleContext(role="inference", run_dir=tmp_path)
    role = Role(RoleSpec(name="inference", command=["true"], start_timeout_s=60.0), context.log_dir, {"PATH": "/bin"})
    role.start()
    role.reap()
    RoleStatus(context).failed(words)
    prefix = label + "(EngineCore_DP0 pid=444) ERROR 11-22 23:26:36 [core.py:1510] "
    before = f"{label}$ serve\n{prefix}OSError: of an earlier start\n{label}$ serve\n"
    lines = [
        "EngineCore failed to start.",
        "Traceback (most recent call last):",
        '  File "a.py", line 7, in b',
        "    c()",
    ]
    told = [*lines, "MemoryError: 4 GiB wanted", "RuntimeError: lost its peer"]
    role.log_file.write_text(before + "\n".join(prefix + line for line in told) + f"\n{words}\n")
    assert role.death().cause == f"{role.spec.label}: {became}: MemoryError: 4 GiB wanted"
    worker = prefix.replace("EngineCore_DP0", "Worker_DP0_TP1").replace("core", "multiproc_executor")
    of_engine = [*lines, "Exception: WorkerProc initialization failed due to an exception in a background process."]
    told = [
        *(worker + line for line in [*lines, "torch.OutOfMemoryError: CUDA out of memory"]),
        *(prefix + line for line in of_engine),
    ]
    role.log_file.write_text(before + "\n".join(told) + f"\n{words}\n")
    assert role.death().cause == f"{role.spec.label}: {became}: torch.OutOfMemoryError: CUDA out of memory"
    role.log_file.write_text("nothing of an engine\n")
    assert role.death().cause == f"{role.spec.label}: {words}"


def test_an_engine_that_refused_something_before_it_died_did_not_die_of_that(tmp_path: Path) -> None:
    context = RoleContext(role="inference", run_dir=tmp_path)
    role = Role(RoleSpec(name="inference", command=["true"], start_timeout_s=60.0), context.log_dir, {"PATH": "/bin"})
    role.start()
    role.reap()
    words = "RuntimeError: an engine process died (EngineCore was killed by signal 9); see its last lines above"
    RoleStatus(context).failed(words)
    core = "(EngineCore pid=4) ERROR 11-22 23:26:36 [core.py:1750] "
    worker = "(Worker_TP1 pid=5) ERROR 11-22 23:26:36 [multiproc_executor.py:1063] "
    refused = [
        worker + "WorkerProc hit an exception.",
        worker + "ValueError: the adapter's rank is 64",
        core + "Invocation of add_lora method failed",
        core + "RuntimeError: Worker failed with error 'the adapter's rank is 64'",
    ]
    role.log_file.write_text("\n".join(refused))
    assert role.death().cause == f"{role.spec.label}: {words}"
    died = [
        core + "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",
        core + "EngineCore encountered a fatal error.",
        core + "RuntimeError: Executor failed.",
    ]
    role.log_file.write_text("\n".join(refused + died))
    became = "an engine died: Worker proc VllmWorker-1 died unexpectedly (exit code: -9)"
    assert role.death().cause == f"{role.spec.label}: {became}"
    rest = "".join(f"(Worker_TP{rank} pid=9) ERROR 11-22 23:26:37 [a.py:1]   frame\n" * 200 for rank in range(8))
    assert len(rest) > 64_000
    role.log_file.write_text("\n".join([*died, rest]))
    assert role.death().cause == f"{role.spec.label}: {became}"


TRACEBACK = """Traceback (most recent call last):
  File "main.py", line 46, in <module>
    import xxhash
    ^^^^^^^^^^^^^
ImportError: libxxhash.so.0: cannot open shared object file
"""
TORCHRUNS = """Traceback (most recent call last):
  File "torchrun.py", line 76, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
Root Cause (first observed failure):
[0]:
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 5)
"""
WATCHDOG = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE) ran 600029 ms"


@pytest.mark.parametrize("label", ["", "0: [n2] "])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_program_that_ended_before_it_could_report_is_read_in_its_log(
    tmp_path: Path, num_processes: int, label: str
) -> None:
    log_dir = RoleContext(role="trainer", run_dir=tmp_path).log_dir
    spec = RoleSpec(name="trainer", command=["false"], start_timeout_s=60.0, num_processes=num_processes)
    role = Role(spec, log_dir, {"PATH": "/usr/bin:/bin"})
    role.start()
    role.reap()
    told = f"$ trainer\n{TRACEBACK}{TORCHRUNS.format(rank=0, code=1)}"
    role.log_file.write_text("".join(label + line for line in told.splitlines(keepends=True)))
    reason = "ended with exit code 1: ImportError: libxxhash.so.0: cannot open shared object file"
    who = f"trainer{' rank 0' if num_processes > 1 else ''}"
    assert role.death().cause == f"{who} {reason}"
    begun = TRACEBACK.partition("ImportError")[0]  # another rank's, which this one's stands in the middle of
    role.log_file.write_text("".join(label + line for line in (begun + TRACEBACK).splitlines(keepends=True)))
    assert role.death().cause == f"trainer {reason}"
    cut_off = TRACEBACK + begun + begun  # two ranks that were killed before theirs were whole
    role.log_file.write_text("".join(label + line for line in cut_off.splitlines(keepends=True)))
    assert role.death().cause == f"trainer {reason}"


def test_a_rank_that_native_code_ended_is_read_in_its_standard_error(tmp_path: Path) -> None:
    """NCCL's watchdog ends the process: the rank itself says nothing, and the others that they were ended."""
    log_dir = RoleContext(role="trainer", run_dir=tmp_path).log_dir
    spec = RoleSpec(name="trainer", command=["false"], start_timeout_s=60.0, num_processes=2)
    role = Role(spec, log_dir, {"PATH": "/usr/bin:/bin"})
    role.start()
    role.reap()
    RoleStatus(RoleContext(role="trainer", run_dir=tmp_path, index=0)).failed("rank 0: ended by SIGTERM")
    role.log_file.write_text("$ trainer\n" + TORCHRUNS.format(rank=1, code=-6))
    stderr = log_dir / "rank_1.stderr.log"
    stderr.write_text(f"[rank1]:[E1126 ProcessGroupNCCL.cpp:683] {WATCHDOG}\nframe #0: c10::Error\n")
    assert role.death().cause == f"trainer rank 1 was killed by signal 6: {WATCHDOG}"
    stderr.write_text("terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: no device\n")
    assert role.death().cause == "trainer rank 1 was killed by signal 6: CUDA error: no device"


def test_a_role_that_waited_for_room_in_vain_ends_the_attempt_with_its_own_code(tmp_path: Path) -> None:
    """And one whose config is wrong with the usual one: after that of a wrong config no job comes back."""
    spec = RoleSpec(name="orchestrator", command=["true"], start_timeout_s=60.0)
    codes = []
    for number, error in enumerate((NoRoom("a: disk full; waited 600 s"), ConfigError("wrong"))):
        context = RoleContext(role="orchestrator", run_dir=tmp_path / str(number))
        role = Role(spec, context.log_dir, {"PATH": "/usr/bin:/bin"})
        role.start()
        role.reap()
        RoleStatus(context).failed(error)
        codes.append(role.death().code)
    assert codes == [74, 1]
