"""Compiled graphs travel between nodes as one whole archive, or not at all."""

import tarfile
from pathlib import Path

import pytest

from prime_hpc.inference.vllm.compiled import CACHES, CompileCache, cache_key, open_cache


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def compile_something(env: dict[str, str]) -> None:
    folder = Path(env["VLLM_CACHE_ROOT"]) / "torch_compile_cache" / "abc"
    folder.mkdir(parents=True)
    (folder / "graph.py").write_text("compiled")


@pytest.mark.parametrize("python", ["with filters", "3.11.0 to 3.11.3"])
def test_a_later_node_finds_what_the_first_compiled(root: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if python != "with filters":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    shared = root / "shared"
    first = CompileCache(shared, root / "node1", "k")
    env = first.open({})
    assert env.keys() == CACHES.keys() and not any(Path(path).exists() for path in env.values())
    first.keep()  # nothing was compiled
    assert not list(shared.iterdir())
    compile_something(env)
    thread = first.keep_soon()
    assert thread is not None
    thread.join()
    assert [path.name for path in shared.iterdir()] == ["k.tar"] and first.keep_soon() is None
    second = CompileCache(shared, root / "node2", "k").open({})
    assert (Path(second["VLLM_CACHE_ROOT"]) / "torch_compile_cache/abc/graph.py").read_text() == "compiled"
    assert not list((root / "node2").glob(".tmp*"))
    other = CompileCache(shared, root / "node2", "other").open({})
    assert not Path(other["VLLM_CACHE_ROOT"]).exists()


def test_two_that_keep_at_once_leave_one_whole_archive(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = root / "shared"
    both = [CompileCache(shared, root / f"node{i}", "k") for i in range(2)]
    for cache in both:
        compile_something(cache.open({}))

    def after_the_other(stage: Path, target: Path) -> Path:
        monkeypatch.undo()
        both[1].keep()
        return stage.replace(target)

    monkeypatch.setattr(Path, "replace", after_the_other)
    both[0].keep()
    assert [path.name for path in shared.iterdir()] == ["k.tar"]
    with tarfile.open(shared / "k.tar") as archive:
        assert "vllm/torch_compile_cache/abc/graph.py" in archive.getnames()


@pytest.mark.parametrize("python", ["with filters", "3.11.0 to 3.11.3"])
@pytest.mark.parametrize("name", ["../outside", "/tmp/prime-hpc-outside"])
def test_an_archive_that_reaches_outside_is_not_used(
    root: Path, python: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if python != "with filters":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    shared = root / "shared"
    shared.mkdir(mode=0o700)
    with tarfile.open(shared / "k.tar", "w") as archive:
        archive.add(__file__, "plain")
        member = archive.gettarinfo(__file__)
        member.name = name
        with Path(__file__).open("rb") as source:
            archive.addfile(member, source)
    inside = CompileCache(shared, root / "node", "k").open({})
    assert not (root / "outside").exists() and not (root / "node" / "outside").exists()
    assert not Path("/tmp/prime-hpc-outside").exists()
    assert inside == {} or name.startswith("/"), "filters take a leading slash away"


def test_whatever_goes_wrong_costs_no_more_than_the_cache(root: Path) -> None:
    shared = root / "shared"
    shared.mkdir(mode=0o700)
    (shared / "k.tar").write_bytes(b"no archive")
    assert CompileCache(shared, root / "node", "k").open({}) == {}
    shared.chmod(0o777)
    assert CompileCache(shared, root / "node", "k2").open({}) == {}
    gone = CompileCache(root / "gone", root / "node", "k")
    compile_something(gone.open({}))
    (root / "gone").rmdir()
    gone.keep()


def test_what_the_user_set_stays(root: Path) -> None:
    env = CompileCache(root / "shared", root / "node", "k").open(
        {"VLLM_CACHE_ROOT": "/mine", "TRITON_CACHE_DIR": str(root / "node" / "triton")}
    )
    assert env.keys() == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


def test_the_key_is_of_what_is_compiled() -> None:
    argv = ["--model", "m", "--port", "8000", "--max-num-seqs", "4"]
    key = cache_key(argv, "H100", "torch2")
    assert key == cache_key(["--model", "m", "--max-num-seqs", "4", "--port", "9"], "H100", "torch2")
    assert (
        len(
            {
                key,
                cache_key(argv, "H200", "torch2"),
                cache_key(argv, "H100", "t"),
                cache_key(argv[:4], "H100", "torch2"),
            }
        )
        == 4
    )


def test_a_server_sets_its_variables(root: Path) -> None:
    environ = {"VLLM_CACHE_ROOT": str(root / "node" / "vllm")}
    open_cache(root / "shared", ["--model", "m"], environ)
    assert environ.keys() == CACHES.keys()
    assert all(Path(path).parent.parent == root / "node" for path in environ.values())
