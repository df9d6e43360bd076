"""The help pages, read from source, say what the pydantic models hold."""

import pytest

from prime_hpc.cli import VERBS, main
from prime_hpc.config.help import help_text, walk
from prime_hpc.config.schema import all_paths, resolve


def test_help_knows_every_key_and_each_has_a_docstring() -> None:
    documented = {path: item for path, item, _ in walk()}
    assert set(documented) == set(all_paths())
    assert not [path for path, item in documented.items() if not item.doc]


def test_help_knows_the_defaults() -> None:
    """A default that is not stated in the class body (a factory, say) would be missing from the page."""
    for path, item, inner in walk():
        node = resolve(tuple(path.split(".")))
        assert node is not None
        if not inner:
            parent = resolve(tuple(path.split(".")[:-1])) if "." in path else None
            assert item.default is not None or (
                parent is not None and path.endswith((".id", "shapes.0.name", "judge_inference.model"))
            ), path


def test_root_page_lists_every_flag() -> None:
    page = help_text("rl", "rl ...", "summary")
    for path, item, inner in walk():
        if not inner or "| None" in item.annotation or "list[" in item.annotation:
            assert f"--{path.replace('_', '-').replace('.0.', '.N.')}" in page, path


@pytest.mark.parametrize(
    ("entrypoint", "present", "absent"),
    [
        (
            "inference",
            ["--server.port INT", "--max-model-len", "--model.name", "--ckpt.interval"],
            ["--trainer.optim.lr"],
        ),
        ("trainer", ["--optim.lr", "--data.fake", "--max-steps"], ["--server.port", "--trainer.optim.lr"]),
        ("sft", ["--data.type auto|jsonl|parquet|hub|fake", "--optim.lr"], ["--batch-size INT"]),
        ("orchestrator", ["--env.N.id", "--eval.interval", "--client.api-key-var"], ["--optim.lr"]),
    ],
)
def test_component_pages_need_no_prefix(entrypoint: str, present: list[str], absent: list[str]) -> None:
    lines = help_text(entrypoint, "usage", "summary", "  --own-flag").splitlines()
    assert "  --own-flag" in lines
    flags = [line.strip() for line in lines if line.startswith("  --")]
    for flag in present:
        assert any(line.startswith(flag) for line in flags), flag
    for flag in absent:
        assert not any(line.startswith(flag) for line in flags), flag


def test_a_section_is_told_in_whole_sentences() -> None:
    page = help_text("rl", "rl", "summary")
    told = " ".join(page.split())
    assert "A server that does not tell them keeps its share. (off until named)" in told
    assert "env.N.sandbox: A sandbox for each episode" in told and "env.0." not in told


@pytest.mark.parametrize("verb", VERBS)
def test_a_help_page_fits_the_terminal(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([verb, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]  # below the usage
    assert [line for line in lines if len(line) > 80 and "|" not in line] == []


def test_bounds_and_defaults_are_shown() -> None:
    page = " ".join(help_text("rl", "rl", "summary").split())
    assert "SFT may state `sft.data.num_epochs` instead. [>= 1; default 100]" in page
    assert "[default outputs]" in page and "[default Qwen/Qwen3-0.6B]" in page
    assert "--model.dtype float32|bfloat16|float16" in page
