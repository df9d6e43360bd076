"""What saves memory changes no number: recomputed and offloaded activations, optimizer state in host memory."""

import contextlib
import copy
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from loguru import logger

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from prime_hpc.config.sections.common import ActivationCheckpointConfig  # noqa: E402
from prime_hpc.runtime import page_locked as page_locked_module  # noqa: E402
from prime_hpc.trainer.checkpointing.staging import HostStage  # noqa: E402
from prime_hpc.trainer.ops import host_copies as host_copies_module  # noqa: E402
from prime_hpc.trainer.ops.recompute import HostCopy, kept_operators, recompute  # noqa: E402
from prime_hpc.trainer.optim.offload import keep_in_host_memory  # noqa: E402


class Block(nn.Module):
    """Attention and a gated feed-forward, called as transformers calls its blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.mix, self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, hidden, *, scale=1.0):
        q, k, v = self.mix(nn.functional.rms_norm(hidden, (16,))).chunk(3, -1)
        hidden = hidden + scale * nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return hidden + self.down(nn.functional.silu(self.up(hidden)))


class Counter(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def gradients(blocks, x, count=False):
    x = x.clone().requires_grad_()
    counter = Counter()
    with counter:
        hidden = x
        for block in blocks:
            hidden = block(hidden, scale=0.5)
        hidden.square().sum().backward()
    return [x.grad, *(p.grad for block in blocks for p in block.parameters())], counter.counts


MODES = [(mode, offload) for mode in ("full", "selective") for offload in (False, True)]


@pytest.mark.parametrize(("mode", "offload"), MODES)
def test_recomputed_blocks_have_the_same_gradients(mode, offload):
    torch.manual_seed(0)
    plain = [Block() for _ in range(3)]
    saving = copy.deepcopy(plain)
    for block in saving:
        recompute(block, ActivationCheckpointConfig(mode=mode, offload=offload))
    x = torch.randn(1, 2, 7, 16)
    expected, before = gradients(plain, x)
    found, after = gradients(saving, x)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert after["silu"] == 2 * before["silu"]  # cheap: computed again
    if mode == "full":
        assert after[attention] == 2 * before[attention] and after["addmm"] > before["addmm"]
    else:
        assert after[attention] == before[attention] and after["addmm"] == before["addmm"]


def test_kept_operators_are_matrix_products_and_attention():
    names = {operator.overloadpacket.__name__ for operator in kept_operators()}
    assert {"mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu"} <= names
    assert "silu" not in names and "mul" not in names


def test_an_offloaded_input_is_held_by_nobody_else():
    import gc

    torch.manual_seed(0)
    block = Block()
    recompute(block, ActivationCheckpointConfig(offload=True))
    x = torch.randn(1, 2, 7, 16, requires_grad=True)
    middle = x * 2
    reference = weakref.ref(middle)
    out = block(middle)
    del middle
    gc.collect()
    assert reference() is None
    out.sum().backward()
    assert x.grad is not None


def test_a_host_copy_does_not_share_the_gradient_s_graph():
    x = torch.randn(3, requires_grad=True)
    restored = HostCopy(x * 1).restore()
    assert restored.is_leaf and restored.requires_grad and torch.equal(restored, x)
    assert not HostCopy(x.detach()).restore().requires_grad


class LateCopies:
    """Copies that happen only when somebody waits for them, between memory that is none of each other's."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.rooms = 0
        self.there: list[weakref.ref] = []
        self.most_bytes = 0

    def room(self, like, old):
        self.rooms += old is None
        return torch.full_like(like, float("nan")) if old is None else old

    def to_host(self, tensor, into=None):
        self.log.append("leave")
        return LateCopy(torch.full_like(tensor, float("nan")) if into is None else into, lambda: tensor)

    def to_device(self, leaving):
        self.log.append("come")
        there = torch.full_like(leaving.on_host(), float("nan"))
        self.there.append(weakref.ref(there.untyped_storage()))
        self.most_bytes = max(self.most_bytes, sum(s.nbytes() for s in (r() for r in self.there) if s is not None))
        return LateCopy(there, leaving.on_host)


class LateCopy:
    def __init__(self, target, source) -> None:
        self._target, self._source = target, source

    def on_host(self):
        if self._source is not None:
            self._target.copy_(self._source())
            self._source = None
        return self._target

    for_device = on_host


def test_an_offloaded_block_s_input_comes_back_while_the_block_behind_it_is_computed(monkeypatch):
    copies = LateCopies()
    monkeypatch.setattr("prime_hpc.trainer.ops.recompute.host_copies", lambda _: copies)
    torch.manual_seed(0)
    plain = [Block() for _ in range(3)]
    saving = copy.deepcopy(plain)
    for index, block in enumerate(saving):
        forward = block.forward

        def logged(*args, forward=forward, index=index, **kw):
            copies.log.append(f"compute {index}")
            return forward(*args, **kw)

        vars(block)["forward"] = logged
        recompute(block, ActivationCheckpointConfig(offload=True))
    x = torch.randn(1, 2, 7, 16)
    for _ in range(2):  # the second micro-batch begins anew
        copies.log.clear()
        expected, _ = gradients(plain, x)
        found, _ = gradients(saving, x)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        forwards = [f"{what}{i}" for i in range(3) for what in ("leave", "compute ")]
        assert copies.log[:6] == [word.rstrip("012") if word.startswith("leave") else word for word in forwards]
        assert copies.log[6:] == ["come", "come", "compute 2", "come", "compute 1", "compute 0"]
    assert copies.most_bytes == 2 * x.nbytes
    copies.log.clear()
    with torch.no_grad():  # a reference model: nobody asks for it again
        saving[0](x)
    assert copies.log == ["compute 0"]


@pytest.mark.parametrize("kind", ["adamw", "signsgd", "muon"])
def test_updates_by_buckets_equal_the_update_at_once(kind):
    from prime_hpc.config.sections.trainer import OptimConfig
    from prime_hpc.trainer.optim import build_optimizer

    copies, limit = LateCopies(), 8 * 100

    def train(offload):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
        momentum = 0.9 if kind == "signsgd" else None
        config = OptimConfig(type=kind, lr=0.1, max_norm=0, momentum=momentum)
        optimizer = build_optimizer(model, config)
        if offload:
            update = optimizer.step

            def logged():
                copies.log.append("update")
                update()

            vars(optimizer)["step"] = logged
            keep_in_host_memory(optimizer, bucket_bytes=limit, copies=copies)
        for step in range(3):
            copies.log.clear()
            (model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step)))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters()), optimizer

    plain, reference = train(offload=False)
    found, optimizer = train(offload=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert [p for group in optimizer.param_groups for p in group["params"]]  # whole again after the step
    state = [
        [s for p in ps for s in opt.state[p].values() if s.dim()]
        for ps, opt in ((plain, reference), (found, optimizer))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*state, strict=True))  # back in host memory, all of it
    assert copies.rooms == len(state[1])  # and each time in the same
    # The next bucket is on its way before a bucket's update is queued, and there are never more than two.
    updates = [i for i, word in enumerate(copies.log) if word == "update"]
    assert len(updates) > 2
    assert all(copies.log[i - 1] == "come" and copies.log[i + 1] == "leave" for i in updates[:-1])
    assert copies.log[updates[-1] - 1] == "leave"
    assert 0 < copies.most_bytes <= 2 * limit


class FakeStream:
    """Logs what it is told to wait for."""

    def __init__(self, name, log) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self):
        return f"what {self.name} has"


def test_copies_of_a_gpu_wait_for_each_other_and_the_host_for_none(monkeypatch):
    log: list[str] = []
    names = iter(["out", "in"])
    compute = FakeStream("compute", log)
    current = [compute]

    @contextlib.contextmanager
    def stream(other):
        current.append(other)
        yield
        current.pop()

    class Tensor(torch.Tensor):  # type: ignore[name-defined]
        def record_stream(self, stream):
            log.append(f"kept for {stream.name}")

        def copy_(self, other, non_blocking=False):
            assert non_blocking
            log.append(f"copy on {current[-1].name}")
            return super().copy_(other)

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: FakeStream(next(names), log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    copies = host_copies_module.StreamCopies(torch.device("cpu"))
    tensor = torch.arange(6.0).as_subclass(Tensor)
    leaving = copies.to_host(tensor, torch.empty(6).as_subclass(Tensor))
    assert log == ["out waits for compute", "copy on out", "kept for out"]
    log.clear()
    coming = copies.to_device(leaving)
    assert log == ["in waits for compute", "in waits for what out has", "copy on in"]
    log.clear()
    assert torch.equal(coming.for_device(), torch.arange(6.0))
    assert log == ["compute waits for what in has"]


def test_host_memory_of_the_optimizer_has_its_exact_size_and_is_given_back(monkeypatch):
    calls: list[tuple] = []

    class Cudart:
        code = 0

        def cudaHostRegister(self, address, size, flags):
            calls.append(("register", address, size))
            return self.code

        def cudaHostUnregister(self, address):
            calls.append(("unregister", address))

    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    host = page_locked_module.page_locked(torch.empty(3, 5, dtype=torch.bfloat16))
    assert host.shape == (3, 5) and host.dtype == torch.bfloat16 and host.untyped_storage().nbytes() == 30
    address = host.data_ptr()
    row = host[1]
    del host
    assert calls == [("register", address, 30)]
    del row
    assert calls[1:] == [("unregister", address)]
    assert page_locked_module.page_locked(torch.empty(0, 4)).shape == (0, 4)


def test_room_for_a_save_is_no_longer_registered_when_it_is_unmapped(monkeypatch):
    """A run of many that ends gives its room back, and the next one's is mapped at the same place: CUDA would go on
    copying to the pages that lay there before."""
    calls: list[tuple] = []

    def unregister(address):
        lines = Path("/proc/self/maps").read_text().splitlines()
        places = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
        calls.append(("unregister", address, any(first <= address < end for first, end in places)))

    def register(address, size, flags):
        calls.append(("register", address, size))
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    stage = HostStage({"a": torch.empty(1 << 20), "b": torch.empty(7)}, None, 1)
    stage.touch()
    last, address = stage.tensors["b"], stage.tensors["a"].data_ptr()
    del stage
    assert calls == [("register", address, (4 << 20) + 64)]  # somebody may still read it
    del last
    assert calls[1:] == [("unregister", address, True)]


@pytest.fixture
def refusing(monkeypatch):
    """Calls into a CUDA that registers nothing, and keeps its error until it is asked for it."""
    calls: list[str] = []

    def register(*_):
        calls.append("register")
        return 2

    library = SimpleNamespace(cudaGetLastError=lambda: calls.append("clear"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(page_locked_module, "_loaded", lambda _: [library])
    monkeypatch.setattr(page_locked_module, "_said", set())
    return calls


def test_host_memory_that_cannot_be_page_locked_leaves_no_error_behind(refusing, monkeypatch):
    page_locked_module.page_locked(torch.ones(4)).fill_(1)
    assert refusing == ["register", "clear"]  # pageable, and nothing to take back
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    stage = HostStage({"a": torch.ones(4)}, None, 1)
    stage.touch()
    stage.copy({"a": torch.ones(4)})
    assert refusing == ["register", "clear"] * 2 and torch.equal(stage.tensors["a"], torch.ones(4))
    monkeypatch.setattr(page_locked_module, "_loaded", lambda _: [])
    monkeypatch.setattr(torch, "ones", lambda *_, device: refusing.append(f"launch on {device}"))
    page_locked_module.page_locked(torch.zeros(4))
    assert refusing[4:] == ["register", "launch on cuda"]


def test_libraries_of_this_process_are_found_by_their_name():
    [library] = page_locked_module._loaded("libtorch_cpu.so")
    assert Path(library._name).samefile(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    assert page_locked_module._loaded("libnone.so") == []


def test_host_memory_that_was_refused_once_is_used_again_and_not_asked_for_anew(refusing, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    copies = host_copies_module.StreamCopies(torch.device("cuda"))
    like, read = torch.empty(3, 4, device="meta"), torch.ones(3, 4)
    said: list[str] = []
    sink = logger.add(said.append, format="{message}", level="WARNING")
    try:
        room = copies.room(like, None)
        assert room.shape == (3, 4) and room.device.type == "cpu"
        assert copies.room(like, room) is room and copies.room(like, read) is read
        assert refusing.count("register") == 1
        other = copies.room(like, like)  # state of the device has no room yet
        assert other.device.type == "cpu" and copies.room(torch.empty(5, device="meta"), room).shape == (5,)
    finally:
        logger.remove(sink)
    assert refusing.count("register") == 3 and len(said) == 1


def test_the_estimate_knows_what_saves_memory():
    from prime_hpc.config import Experiment
    from prime_hpc.launch.estimate.model_facts import model_facts
    from prime_hpc.launch.estimate.trainer_memory import trainer_gib

    sizes = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    facts = model_facts({**sizes, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151_936})
    assert facts is not None

    def gib(ac=None, optim=None):
        tree = {"model": {"ac": ac}, "trainer": {"optim": optim or {}, "num_ranks": 8}, "seq_len": 16_384}
        parts = trainer_gib(Experiment.model_validate(tree), facts)
        assert parts is not None
        return parts["activations"], parts["state"]

    plain, full, full_offload = gib(), gib({}), gib({"offload": True})
    selective = gib({"mode": "selective"})
    assert full_offload[0] < full[0] < selective[0] < plain[0]
    assert gib(optim={"offload": True})[1] == pytest.approx(plain[1] / 2)


@pytest.fixture(scope="module")
def train(group, tmp_path_factory):
    """(model section, optimizer section) -> weights after three RL steps on one rank, the last step's metrics."""
    from functools import partial

    from prime_hpc.config.sections.common import ModelConfig
    from prime_hpc.config.sections.parallel import ParallelDims
    from prime_hpc.config.sections.trainer import LossConfig, OptimConfig, TrainerConfig
    from prime_hpc.trainer.model.load_policy import load_policy
    from prime_hpc.trainer.objectives import rl_loss
    from prime_hpc.trainer.optim import build_optimizer
    from prime_hpc.trainer.parallel import build_parallel
    from prime_hpc.trainer.train_step import TrainStep
    from tests.support.tiny_model import make_tiny_model, random_rank_batch

    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    cpu = torch.device("cpu")

    def run(model, optim):
        config = ModelConfig(name=str(folder), **({"dtype": "float32"} | model))
        parallel = build_parallel(ParallelDims(), "cpu")
        policy = load_policy(config, folder, parallel, cpu, reshard_after_forward=True, chunk_tokens=512)
        section = OptimConfig(lr=1e-2, **optim)
        train_step = TrainStep(
            policy, build_optimizer(policy, section), TrainerConfig(optim=section, no_sync=False),
            max_steps=9, normalize="token", device=cpu, peak_flops=1.0,
        )  # fmt: skip
        for step in (1, 2, 3):
            batch = random_rank_batch([[20, 9], [15]], seed=step, step=step)
            metrics = train_step.run(step, batch, partial(rl_loss, LossConfig()))
        return {name: tensor.full_tensor().detach() for name, tensor in policy.hf.named_parameters()}, metrics

    return run


@pytest.mark.parametrize("optim", [{}, {"offload": True}], ids=["", "optim-offload"])
@pytest.mark.parametrize("ac", [{}, {"mode": "selective"}, {"mode": "selective", "offload": True, "freq": 2}], ids=str)
def test_a_policy_trains_to_the_same_weights(train, ac, optim):
    plain, _ = train({}, {})
    found, _ = train({"ac": ac}, optim)
    assert all(torch.equal(plain[name], found[name]) for name in plain)


def test_a_policy_trains_in_float8_near_bfloat16(train):
    half, expected = train({"dtype": "bfloat16"}, {})
    eighth, found = train({"dtype": "bfloat16", "fp8": True, "ac": {"mode": "selective"}}, {})
    assert found["loss"] != expected["loss"] and found["loss"] == pytest.approx(expected["loss"], rel=0.2)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.2)
    assert any(not torch.equal(half[name], eighth[name]) for name in half)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"model": {"fp8": True, "dtype": "float32"}}, "bfloat16"),
        ({"model": {"fp8": True, "lora": {}}}, "model.lora"),
        ({"model": {"fp8": True}, "trainer": {"num_ranks": 2, "parallel": {"tp": 2}}}, "trainer.parallel.tp"),
    ],
)
def test_where_float8_cannot_be_used(tree, words):
    from prime_hpc.config import Experiment

    with pytest.raises(ValueError, match=f"fp8.*{words}"):
        Experiment.model_validate(tree)


class _IntoABuffer(torch.autograd.Function):  # type: ignore[name-defined]
    """A product into a buffer that is used again, as compiled graphs have them."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        buffer = torch.empty(len(x), weight.shape[1])
        torch.mm(x, weight, out=buffer)
        return buffer.mul_(2).clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad @ ctx.saved_tensors[0].T, None


def test_selective_recomputation_keeps_no_buffer_that_is_used_again():
    class Block(nn.Module):
        def forward(self, x):
            return _IntoABuffer.apply(x.sin(), torch.eye(3)).cos()

    x, block = torch.randn(4, 3, requires_grad=True), Block()
    (plain,) = torch.autograd.grad(block(x).sum(), x)
    recompute(block, ActivationCheckpointConfig(mode="selective"))
    (again,) = torch.autograd.grad(block(x).sum(), x)
    assert torch.equal(plain, again)
