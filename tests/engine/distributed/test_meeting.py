"""How the processes of one engine find each other, and whom they refuse."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxllm import EngineConfig
from jaxllm.engine.distributed.cluster import find_processes
from jaxllm.engine.distributed.facts import facts_of
from jaxllm.engine.distributed.links import Ended, Hello, Link, Welcome, split_address
from jaxllm.engine.distributed.meeting import find_leader, wait_for_all
from jaxllm.engine.local_engine import LocalEngine
from tests.engine.distributed.processes import configs


def together(*functions: Callable[[], Any]) -> list[Any]:
    """What each gives or raises, all run at once."""
    results: list[Any] = [None] * len(functions)

    def run(i: int) -> None:
        try:
            results[i] = functions[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"process_id": 1}, "--coordinator-address and --num-processes must be given too"),
        ({"coordinator_address": "h:1", "num_processes": 2}, "--process-id must be given too"),
        (
            {"coordinator_address": "h:1", "num_processes": 2, "process_id": 2},
            "--process-id must be from 0 to --num-processes 2 less one, got 2",
        ),
        ({"coordinator_address": "host", "num_processes": 2, "process_id": 0}, "must be host:port"),
        (
            {
                "coordinator_address": "h:1",
                "num_processes": 2,
                "process_id": 0,
                "pipeline_parallel_size": 2,
            },
            "--pipeline-parallel-size works within one process so far",
        ),
        ({"num_processes": 0}, "--num-processes must be at least 1"),
    ],
)
def test_flags_that_name_no_group_are_refused(options, said):
    with pytest.raises(ValueError) as refused:
        EngineConfig(**options)
    assert said in str(refused.value)


def test_offline_use_of_several_processes_is_refused():
    with pytest.raises(ValueError, match=r"jaxllm\.serve"):
        LocalEngine(configs()[0])


def test_processes_meet_whoever_comes_first_and_strangers_do_not_matter():
    first, *others = configs(3, join_timeout=30)

    def stranger() -> None:
        time.sleep(0.2)
        with socket.create_connection(split_address(str(first.coordinator_address))) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""

    def lead() -> dict[int, Link]:
        time.sleep(0.1)
        links = wait_for_all(first, facts_of(first))
        for link in links.values():
            link.send(Welcome(77))
        return links

    follows = [lambda c=c: find_leader(c, facts_of(c)) for c in others]
    links, (link, port), _, refused = together(lead, *follows, stranger)
    assert refused is None
    assert sorted(links) == [1, 2]
    assert port == 77
    links[1].send(Ended("a word"))
    assert link.receive() == Ended("a word")


def test_a_flag_that_differs_is_named_on_both_sides():
    first, second = configs(max_model_len=128, join_timeout=20)
    second = second.replace(max_model_len=256, compilation_cache_dir="elsewhere")
    said = together(
        lambda: wait_for_all(first, facts_of(first)),
        lambda: find_leader(second, facts_of(second)),
    )
    for error in said:
        assert isinstance(error, ValueError)
        assert "--max-model-len is 256 in process 1 and 128 in process 0" in str(error)


def test_who_waits_in_vain_says_for_whom_and_how_long():
    first, second, _ = configs(3, join_timeout=1)
    leader, follower = together(
        lambda: wait_for_all(first, facts_of(first)),
        lambda: find_leader(second, facts_of(second)),
    )
    assert isinstance(leader, TimeoutError)
    assert "2 of 3 processes joined" in str(leader)
    assert "within 1 s (--join-timeout); missing: 2." in str(leader)
    assert str(follower) == str(leader)
    with pytest.raises(TimeoutError, match=r"Process 0 of 3 .* did not appear within 1 s"):
        find_leader(second, facts_of(second))


def test_an_id_is_taken_once_but_may_come_again_after_its_end():
    first, *_ = configs(3, join_timeout=2)
    facts = facts_of(first)

    def come(after_s: float) -> Link:
        time.sleep(after_s)
        address = split_address(str(first.coordinator_address))
        link = Link(socket.create_connection(address), "")
        link.send(Hello(1, "host", facts))
        return link

    def come_twice() -> Any:
        come(0.2).close()
        kept, late = come(0.3), come(0.3)
        answer = late.receive()
        kept.close()
        return answer

    _, answer = together(lambda: wait_for_all(first, facts), come_twice)
    assert answer == Ended("Process 1 has joined already: see --process-id.")


SLURM = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "JAX_COORDINATOR_", "KUBERNETES_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "")  # so that what is set is taken back
    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS")
    return monkeypatch


@pytest.mark.parametrize(("names", "host"), [(SLURM, "gpu07"), (OPEN_MPI, "10.96.0.1")])
def test_the_schedulers_environment_is_read_by_jax(names, host, environment):
    for name, value in names.items():
        environment.setenv(name, value)
    found = find_processes(EngineConfig(distributed=True))
    assert (found.num_processes, found.process_id) == (2, 1)
    assert str(found.coordinator_address).startswith(host + ":")
    assert os.environ["JAX_LOCAL_DEVICE_IDS"] == "0"


def test_without_a_scheduler_the_flags_are_asked_for_with_what_is_missing(environment):
    environment.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ValueError) as refused:
        find_processes(EngineConfig(distributed=True, process_id=0))
    said = str(refused.value)
    assert "neither SLURM, Open MPI nor Kubernetes tells --coordinator-address" in said
    assert "--process-id" not in said
    assert "jax[k8s]" in said
