"""Ports and addresses: what is taken looks taken from its choice to its end, in both families and in every range."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path

import httpx
import pytest
from aiohttp.helpers import get_env_proxy_for_url
from yarl import URL

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.inference.main import _bind
from prime_hpc.store.messaging import network, sockets
from prime_hpc.store.messaging.bus import BusClient, BusServer
from prime_hpc.store.messaging.file_transfer import HandoverServer
from prime_hpc.store.messaging.json_lines import parse_address
from prime_hpc.store.messaging.network import (
    Network,
    Place,
    find_place,
    local_places,
    network_environment,
    past_proxies,
)
from prime_hpc.store.messaging.sockets import NoFreePort, PortRange
from prime_hpc.supervisor.main import place
from prime_hpc.supervisor.roles import ports
from prime_hpc.supervisor.roles.process import Role
from prime_hpc.supervisor.roles.spec import RoleSpec
from tests.support.scripted_role import Health


@pytest.fixture(autouse=True)
def _promises() -> Iterator[None]:
    yield
    ports.release(sockets.reserved())


@pytest.fixture
def free() -> int:
    """A port that nobody has."""
    (port,) = ports.choose(1, ports.run_base(Path("/"), f"test of sockets {os.getpid()}"))
    ports.release([port])
    return port


def by_another(code: str) -> str:
    """Output of a python that knows `sockets`."""
    words = [sys.executable, "-c", f"from prime_hpc.store.messaging import sockets; {code}"]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=280).stdout.strip()


def test_the_port_of_a_server_that_still_loads_is_taken(free: int) -> None:
    server = _bind("127.0.0.1", free, "inference.server.port")  # bound, and not listening for minutes
    with server:
        assert by_another(f"print(sockets.is_free({free}), sockets.is_free({free}, '::'))") == "False False"
        with socket.socket() as second:
            second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                second.bind(("127.0.0.1", free))
        with pytest.raises(ValueError, match=rf"127.0.0.1:{free}.*inference.server.port"):
            _bind("127.0.0.1", free, "inference.server.port")


def test_a_second_run_on_a_machine_is_refused_while_the_first_loads(tmp_path: Path, free: int) -> None:
    tree = {
        "model": {"name": "m"},
        "inference": {"server": {"port": free}},
        "orchestrator": {"env": [{"id": "reverse-text"}]},
    }
    place(Experiment.model_validate(tree), tmp_path, {"CUDA_VISIBLE_DEVICES": ""})  # its server has not even begun
    second = (
        "from pathlib import Path; from prime_hpc.config import Experiment; "
        "from prime_hpc.supervisor.main import place; "
        f"place(Experiment.model_validate({tree}), Path('{tmp_path}'), dict(CUDA_VISIBLE_DEVICES=''))"
    )
    done = subprocess.run([sys.executable, "-c", second], capture_output=True, text=True, timeout=280)
    assert done.returncode == 1
    assert f"inference.server.port = {free}: the port is already taken" in done.stderr


def test_connections_that_linger_do_not_take_a_port(free: int) -> None:
    with sockets.bind("127.0.0.1", free) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does when it begins to serve
        server.listen()
        with socket.create_connection(("127.0.0.1", free)) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    assert ports.is_free(free, "127.0.0.1")
    sockets.bind("127.0.0.1", free).close()  # the next server gets it


def test_an_address_of_another_machine_is_not_called_a_taken_port(free: int) -> None:
    for attempt in (lambda: ports.choose(1, free, "192.0.2.1"), lambda: ports.require_free(free, "192.0.2.1", "k")):
        with pytest.raises(ConfigError, match=r"192.0.2.1 is no address of node"):
            attempt()


def test_a_reservation_is_seen_by_others_and_ends_with_its_process(free: int) -> None:
    asked = f"print(sockets.is_free({free}), sockets.reserve({free}))"
    assert by_another(asked) == "True True"
    assert ports.reserve(free)
    assert by_another(asked) == "False False"
    ports.release([free])
    assert by_another(asked) == "True True"


def test_agents_of_one_node_are_given_different_ports() -> None:
    base = ports.run_base(Path("/"), "4711")
    first = ports.choose(2, base, sockets.ALL)
    code = f"print(set(ports.choose(2, {base}, sockets.ALL)) & set({first}))"
    assert by_another(f"from prime_hpc.supervisor.roles import ports; {code}") == "set()"


def test_a_full_range_names_itself_its_key_and_the_node(free: int) -> None:
    narrow = PortRange(free, free, "network.port_range")
    hub = BusServer(ports=narrow)
    try:
        assert hub.address.endswith(f":{free}")
        for attempt in (lambda: BusServer(ports=narrow), lambda: ports.choose(1, free, within=narrow)):
            with pytest.raises(NoFreePort) as caught:
                attempt()
            text = str(caught.value)
            assert f"network.port_range: {free}-{free}" in text and socket.gethostname() in text
        bus = BusClient(hub.address, "test")
        server = HandoverServer(bus, Network(narrow))  # the files do without it
        assert server.offer(Path("/a/b")) is None
        server.close()
        bus.close()
    finally:
        hub.close()


@pytest.mark.parametrize("text", ["20000", "a-b", "30000-20000", "80-90", "60000-70000", ""])
def test_a_wrong_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="FIRST-LAST"):
        Experiment.model_validate({"network": {"port_range": text}})


@pytest.mark.parametrize(("text", "said"), [("10.0.0.0/40", "write a network as"), ("ib0,,ib1", "must name")])
def test_a_wrong_network_is_refused(text: str, said: str) -> None:
    for key in ("control", "serving", "collectives"):
        with pytest.raises(ValueError, match=said):
            Experiment.model_validate({"network": {key: text}})


def test_all_of_a_runs_ports_are_in_its_range(tmp_path: Path, free: int) -> None:
    tree = {
        "network": {"port_range": f"{free}-{free + 50}"},
        "model": {"name": "m"},
        "inference": {"num_replicas": 2},
        "orchestrator": {"env": [{"id": "reverse-text"}]},
    }
    specs, urls = place(Experiment.model_validate(tree), tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    numbers = [int(url.split(":")[2].split("/")[0]) for url in urls["inference"]]
    rendezvous = [int(word.rpartition(":")[2]) for word in specs[-1].command if word.rpartition(":")[2].isdigit()]
    assert len({*numbers, *rendezvous}) >= 3
    assert all(free <= port <= free + 50 for port in numbers + [port for port in rendezvous if port > 1000])


def test_addresses_of_both_families() -> None:
    assert sockets.http_url("fd00::2", 8000) == "http://[fd00::2]:8000/v1"
    assert parse_address(sockets.join("fd00::2", 29)) == ("fd00::2", 29)
    assert parse_address("word@[::1]:29") == ("::1", 29)
    assert [sockets.is_loopback(h) for h in ("::1", "[::1]", "127.0.1.1", "localhost", "10.0.0.1", "gpu1")] == [
        *(True, True, True, True),
        *(False, False),
    ]


def test_a_network_is_an_interface_or_addresses_and_a_node_without_it_says_what_it_has() -> None:
    places = [Place("eth0", "192.168.0.4"), Place("ib0", "10.1.2.3"), Place("ib0", "fd00::3"), Place("hsn0", "fd01::3")]
    assert find_place("ib0", "k", places).address == "10.1.2.3"  # IPv4 first, as `local_places` lists them
    assert find_place("fd00::/8", "k", places).address == "fd00::3"
    assert find_place("ib1, 10.1.0.0/16", "k", places).address == "10.1.2.3"
    assert find_place("hsn0", "k", places).is_ipv6
    with pytest.raises(ConfigError, match=r"network.control: ib7: node .* has no such.*it has eth0 192.168.0.4, ib0"):
        find_place("ib7", "network.control", places)


def test_what_the_supervisor_says_is_what_processes_read() -> None:
    stated = Network(PortRange(20000, 20999, "network.port_range"), "ib0", None, "fd00::/8")
    assert Network.from_env(stated.to_env()) == stated
    assert Network.from_env({}) == Network() and not Network().to_env()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this kernel has no IPv6")
def test_hub_and_handover_by_ipv6(tmp_path: Path) -> None:
    hub = BusServer("::1")
    assert "@[::1]:" in hub.address
    bus = BusClient(hub.address, "test")
    try:
        bus.publish("weights", step=1)
        assert bus.wait("weights", lambda message: message["step"] == 1, 30.0)
        server = HandoverServer(bus)
        source = server.offer(tmp_path)
        assert source is not None
        with socket.create_connection(parse_address(source), 5):
            pass
        server.close()
    finally:
        bus.close()
        hub.close()


def test_on_the_hubs_machine_the_hubs_name_is_announced() -> None:
    """Debian gives a machine's own name the address 127.0.1.1, which is asked from 127.0.0.1."""
    hub = BusServer("", advertise="127.0.1.1")
    bus = BusClient(hub.address, "test")
    try:
        bus.publish("weights", step=1)
        assert bus.wait("weights", lambda message: message["step"] == 1, 30.0)
        assert bus.local_host == "127.0.1.1"
    finally:
        bus.close()
        hub.close()


def test_which_interface_a_roles_collectives_use(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = next((place for place in local_places() if not sockets.is_loopback(place.address)), None)
    loopback = next(place for place in local_places() if sockets.is_loopback(place.address))
    alone = network_environment(Network(), {}, ["a"], "a")
    assert alone == {"GLOO_SOCKET_IFNAME": loopback.interface}, "nobody else shall reach what asks for no key"
    assert network_environment(Network(), {"GLOO_SOCKET_IFNAME": "ib0"}, ["a"], "a") == {}, "the site's word"
    named = network_environment(Network(collectives=loopback.interface), {}, ["a", "b"], "a")
    assert named["NCCL_SOCKET_IFNAME"] == f"={loopback.interface}"
    assert named["VLLM_HOST_IP"] == loopback.address
    monkeypatch.setattr(network, "_is_hostname_loopback", lambda: False)
    assert network_environment(Network(), {}, ["a", "b"], "a") == {}
    monkeypatch.setattr(network, "_is_hostname_loopback", lambda: True)
    if outer is not None:
        told = network_environment(Network(), {}, ["a", outer.address], "a")
        assert told["GLOO_SOCKET_IFNAME"] in {p.interface for p in local_places() if p.address == outer.address}
    assert network_environment(Network(), {}, ["a", "no such node."], "a") == {}


def test_a_proxy_is_not_asked_for_ones_own_machine() -> None:
    assert past_proxies({"PATH": "/bin"}) == {}
    told = past_proxies({"https_proxy": "http://proxy:3128", "NO_PROXY": "example.org"})
    assert told["no_proxy"] == told["NO_PROXY"] == "example.org,localhost,127.0.0.1,::1"


@pytest.mark.parametrize("proxy", [{}, {"https_proxy": "http://proxy:3128"}])
@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("[fd00::]/8", ""),
        ("fd00::/8", ""),
        ("[fd00::7]:8000", "fd00::7"),
        ("[fd00::", "fd00::"),
        ("[::1],10.0.0.0/8", "::1,10.0.0.0/8"),
    ],
)
def test_what_httpx_raises_for_is_not_handed_on(
    monkeypatch: pytest.MonkeyPatch, proxy: dict[str, str], word: str, told: str
) -> None:
    """Proxy or not."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("no_proxy", word)
    with pytest.raises(httpx.InvalidURL):
        httpx.Client()
    found = past_proxies({**proxy, "no_proxy": word})
    words = [*filter(None, told.split(",")), *(["localhost", "127.0.0.1", "::1"] if proxy else [])]
    assert found == dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(dict.fromkeys(words)))
    for name, value in {**proxy, **found}.items():
        monkeypatch.setenv(name, value)
    httpx.Client().close()
    assert past_proxies(found) == {}


def test_ipv6_hosts_are_past_a_proxy_for_every_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """With brackets httpx raises, and so does each client of a model that is made of it."""
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "http://proxy:3128" if name == "http_proxy" else "[::1], [fd00::7]:8000")
    for name, words in past_proxies(os.environ, "fd00::5").items():
        monkeypatch.setenv(name, words)
    client, url = httpx.Client(), "http://[{}]:8000/v1"
    for host in ("fd00::5", "fd00::7", "::1"):
        assert client._transport_for_url(httpx.URL(url.format(host))) is client._transport
        with pytest.raises(LookupError):
            get_env_proxy_for_url(URL(url.format(host)))
    assert client._transport_for_url(httpx.URL(url.format("fd00::6"))) is not client._transport


def test_a_servers_health_is_asked_past_a_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/health"
        role = Role(RoleSpec("inference", ["true"], 1.0, health_url=url), tmp_path, {}, {})
        assert role.healthy(timeout_s=30.0)
        server.shutdown()


IPV6_ALONE = """
from pathlib import Path
from prime_hpc.store.messaging import sockets
from prime_hpc.store.messaging.bus import BusClient, BusServer
from prime_hpc.store.messaging.file_transfer import HandoverServer
from prime_hpc.supervisor.roles import ports
assert sockets.loopback() == "::1", sockets.loopback()
(port,) = ports.choose(1, 20000, sockets.ALL)
with sockets.bind(sockets.ALL, port) as server:
    assert not sockets.is_free(port, "::1")
for host in (sockets.loopback(), sockets.ALL):
    hub = BusServer(host, advertise="::1")
    bus = BusClient(hub.address, "test")
    bus.publish("weights", step=1)
    assert bus.wait("weights", lambda message: message["step"] == 1, 60.0)
    server = HandoverServer(bus)
    print(server.offer(Path("/a/b")))
    server.close(), bus.close(), hub.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a network without IPv4 needs a namespace, which needs root")
@pytest.mark.skipif(not (shutil.which("unshare") and shutil.which("ip")), reason="unshare or ip (iproute2) is missing")
def test_a_machine_with_ipv6_alone() -> None:
    script = 'ip link set lo up && ip address del 127.0.0.1/8 dev lo && exec "$0" -c "$1"'
    words = ["unshare", "-n", "sh", "-c", script, sys.executable, IPV6_ALONE]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    if "unshare" in done.stderr:
        pytest.skip(f"no namespace of its own here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("[::1]:") for line in done.stdout.split()) and len(done.stdout.split()) == 2
