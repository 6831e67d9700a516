"""The parts of the Ray Serve application that need no cluster."""

import json
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray itself, when it is imported
    pytest.importorskip("ray.serve", reason="needs the extra `ray`")

from jaxllm.serve.errors import ApiError
from jaxllm.serve.ray.affinity import PrefixAffinityRouter, affinity_key
from jaxllm.serve.ray.application import make_application
from jaxllm.serve.ray.front import _Answer
from jaxllm.serve.ray.metrics import merge_metrics
from jaxllm.serve.ray.options import parse_args, parse_settings

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def key(body: Any, path: str = COMPLETIONS, characters: int = 8) -> str:
    return affinity_key(path, json.dumps(body).encode(), characters)


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_prompts_that_begin_alike_have_one_key():
    assert key({"prompt": "12345678 one"}) == key({"prompt": "12345678 two", "seed": 1}) != ""
    assert key({"prompt": "12345678"}) != key({"prompt": "1234567"})
    assert key({"prompt": ["12345678 one", "x"]}) == key({"prompt": "12345678 two"})
    assert key({"prompt": [1, 2, 3]}) == key({"prompt": [1, 2, 4]})  # two tokens for 8 characters
    assert key({"prompt": [[1, 2, 3]]}) == key({"prompt": [1, 2, 4]})


def test_a_conversation_keeps_its_key_and_shares_none():
    system, first = turn("system", "You are kind"), turn("user", "Hello")
    opening = key({"messages": [system, first]}, CHAT)
    later = [system, first, turn("assistant", "Hi"), turn("user", "And now?")]
    assert key({"messages": later}, CHAT) == opening != ""
    assert key({"messages": [system, turn("user", "Good day")]}, CHAT) != opening
    parts = turn("user", [{"type": "text", "text": "Hello"}])
    assert key({"messages": [parts]}, CHAT) != ""


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"prompt": 1}', b'{"prompt": []}', b'{"messages": [1]}']
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_has_no_beginning_has_no_key(path, body):
    assert affinity_key(path, body, 8) == ""


def test_no_key_elsewhere_or_when_turned_off():
    assert key({"prompt": "abc"}, "/tokenize") == ""
    assert key({"prompt": "abc"}, characters=0) == ""


class Name(NamedTuple):
    unique_id: str


class Busy(PrefixAffinityRouter):
    """The router with queue lengths of the test's; the cluster's part is left out."""

    def __init__(self, lengths: dict[str, int | None]) -> None:
        self.lengths = lengths
        self.initialize_state(slack=2)

    @property
    def replica_queue_len_cache(self) -> Any:
        return SimpleNamespace(get=lambda replica_id: self.lengths[replica_id.unique_id])

    async def ranks(self, **call: Any) -> list[list[str]]:
        replicas: Any = [SimpleNamespace(replica_id=Name(name)) for name in self.lengths]
        request: Any = SimpleNamespace(kwargs=call)
        ranks = await self.choose_replicas(replicas, request)
        return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]


async def test_a_key_has_one_home_until_that_is_too_busy():
    names = [f"replica-{i}" for i in range(5)]
    home = (await Busy(dict.fromkeys(names)).ranks(affinity="k"))[0][0]
    lengths: dict[str, int | None] = dict.fromkeys(names, 3)
    assert (await Busy(lengths | {home: 5}).ranks(affinity="k"))[0] == [home]
    busy = lengths | {home: 6, "replica-5": 0}
    assert (await Busy(busy).ranks(affinity="k"))[0] == ["replica-5"]
    assert (await Busy(busy).ranks())[0] == ["replica-5"]
    burst = Busy(dict.fromkeys(names, 0))
    burst.under_way[Name(home)] += 3  # pyright: ignore
    assert (await burst.ranks(affinity="k"))[0] != [home]
    assert (await Busy({home: 9}).ranks(affinity="k"))[0] == [home]

    # Only the keys of a replica that is lost move.
    homes = {k: (await Busy(dict.fromkeys(names)).ranks(affinity=k))[0][0] for k in "abcdefgh"}
    rest = dict.fromkeys(name for name in names if name != home)
    for k, was in homes.items():
        now = (await Busy(rest).ranks(affinity=k))[0][0]
        assert now == was or was == home
    assert len(set(homes.values())) > 1


async def test_replicas_that_refused_are_avoided_while_there_are_others():
    router = Busy({"a": 0, "b": 9})
    for avoid in (("a",), ("a", "gone")):
        assert (await router.ranks(affinity="k", avoid=avoid))[0] == ["b"]
    assert await router.ranks(avoid=("a", "b")) == await router.ranks() == [["a"], ["b"]]
    assert await Busy({}).ranks(affinity="k") == []


async def test_an_error_is_a_status_until_something_was_sent_then_an_event():
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    error = ApiError("Lost.", status=503, code="replica_lost", headers={"Retry-After": "2"})
    start = {"type": "http.response.start", "status": 200, "headers": []}
    answer = _Answer(send)
    await answer.send(start)
    await answer.fail(error)
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"2") in sent[0]["headers"]

    sent.clear()
    answer = _Answer(send)
    await answer.send(start)
    await answer.send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
    await answer.fail(error)
    assert [message["type"] for message in sent[1:]] == ["http.response.body"] * 2
    assert sent[0]["status"] == 200
    event, done, _ = sent[-1]["body"].split(b"\n\n")
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "replica_lost"
    assert done == b"data: [DONE]"
    assert not sent[-1]["more_body"]


def test_settings_are_the_flags():
    command, options = parse_settings(
        {"model": "m", "num_replicas": "2", "tensor-parallel-size": 2, "enforce_eager": "true",
         "api_key": ["a", "b"], "affinity_slack": None, "num_gpus": 0.5}
    )  # fmt: skip
    flags = "m --num-replicas 2 -tp 2 --enforce-eager --api-key a --api-key b --num-gpus 0.5"
    assert parse_args(flags.split())[1] == options
    assert (command.engine, command.serve) == (
        (same := parse_args(flags.split())[0]).engine,
        same.serve,
    )
    assert options.num_replicas == 2
    assert command.engine.enforce_eager


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_replica": 2}, "unknown flag --num-replica; did you mean --num-replicas"),
        ({"num_replicas": 0}, "--num-replicas must be at least 1, got 0"),
        ({"num_replicas": "two"}, "'two' is not a whole number"),
        ({"enforce_eager": "perhaps"}, "must be true or false"),
        ({"block_size": 7}, "--block-size must be a power of two"),
        ({"port": 80}, "--port is not for replicas: Ray opens the port"),
        ({"dump_config": "x"}, "--dump-config is not for replicas: GET /server_info"),
        ({"distributed": True}, "--distributed is not for replicas: a replica is on one host"),
    ],
)
def test_a_bad_setting_is_named(settings, said):
    with pytest.raises(ValueError, match=said):
        parse_settings(settings)


def test_a_replica_asks_for_the_gpus_of_its_mesh():
    def gpus(**settings: Any) -> float:
        front = make_application(*parse_settings(settings))
        replica = front._bound_deployment.init_args[0]._bound_deployment  # pyright: ignore
        return replica.ray_actor_options["num_gpus"]

    assert gpus() == 1
    assert gpus(tensor_parallel_size=4) == 4
    assert gpus(tensor_parallel_size=4, pipeline_parallel_size=2) == 8
    assert gpus(tensor_parallel_size=4, num_gpus=0) == 0


def test_metrics_of_all_replicas_are_one_page():
    page = '# HELP up x\n# TYPE up gauge\nup{model="m"} 1.0\n# HELP n y\n# TYPE n counter\nn 2.0\n'
    assert merge_metrics({"b": page, "a": page}).splitlines() == [
        "# HELP up x",
        "# TYPE up gauge",
        'up{replica="a",model="m"} 1.0',
        'up{replica="b",model="m"} 1.0',
        "# HELP n y",
        "# TYPE n counter",
        'n{replica="a",} 2.0',
        'n{replica="b",} 2.0',
    ]
