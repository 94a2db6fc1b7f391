"""A cluster whose services speak only mTLS to each other, with every way in: gRPC, OpenAI over https, the commands of operators."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator

import grpc.aio
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.paced_models import write_paced_model
from deploy import cli
from kvstore import cli as kvstore_cli
from moontide import rpc
from moontide.client import GenerateOptions, MoontideClient
from moontide.errors import NodeLost
from moontide.tls import Tls
from tests.cluster import RunningCluster, running_cluster
from tests.fakes.certificates import CertificateFiles

pytestmark = pytest.mark.processes

PROMPT = list(range(3, 203))
PARAMS = GenerateOptions(max_tokens=8, ignore_eos=True)
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    made = CertificateFiles(tmp_path_factory.mktemp("certificates"))
    made.issue("moontide", "127.0.0.1", common_name="first")
    return made


@pytest.fixture(scope="module")
def cluster(files: CertificateFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    model = write_paced_model(
        tmp_path_factory.mktemp("models"), max_context=2048, overhead_s=1e-3, token_s=1e-5, pair_s=0.0
    )
    settings = [
        *model.settings_for(1),
        "prefill.num_pages=64",
        "decode.num_pages=64",
        "kvstore.pool_bytes=67108864",
        "conductor.local_prefill=false",
        f"tls.cert_file={files.directory}/tls.crt",
        f"tls.key_file={files.directory}/tls.key",
        f"tls.ca_file={files.directory}/ca.crt",
        "tls.require_client_cert=true",
    ]
    with running_cluster(model=model.directory, dtype="bfloat16", stages=1, conductors=2, settings=settings) as running:
        yield running


def client_options(files: CertificateFiles) -> list[str]:
    names = {"--ca": "ca.crt", "--cert": "tls.crt", "--key": "tls.key"}
    return [word for option, name in names.items() for word in (option, str(files.directory / name))]


async def generate(client: MoontideClient, idempotency_key: str = "") -> list[int]:
    async with asyncio.timeout(TIMEOUT_S):
        chunks = [chunk async for chunk in client.generate(PROMPT, params=PARAMS, idempotency_key=idempotency_key)]
    assert chunks[-1].finish_reason == "length"
    return [token.token_id for chunk in chunks for token in chunk.tokens]


async def health(address: str, tls: Tls | None) -> str:
    """What gRPC health says to a new channel; the name of the status that a failed call ends with."""
    async with rpc.open_channel(address, tls) as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


async def served_name(address: str, files: CertificateFiles) -> str:
    """Common name in the certificate that a new connection is shown."""
    context = ssl.create_default_context(cafile=files.directory / "ca.crt")
    context.load_cert_chain(files.directory / "tls.crt", files.directory / "tls.key")
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(TIMEOUT_S):
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    subject = dict(entry[0] for entry in writer.get_extra_info("peercert")["subject"])
    writer.close()
    return str(subject["commonName"])


async def grpc_addresses(cluster: RunningCluster, files: CertificateFiles) -> dict[str, str]:
    """Of every service, by its node id."""
    async with MoontideClient(cluster.grpc_address, tls=files.config()) as client:
        nodes = (await client.status()).nodes
    found = {node.node_id: node.address for node in nodes}
    assert found.keys() >= {"conductor-0", "conductor-1", "decode-0", "kvstore-0"}
    assert len(found) == 5
    return found


async def test_prompt_goes_through_and_both_conductors_tell_the_answer_to_a_key(
    cluster: RunningCluster, files: CertificateFiles
) -> None:
    answers = []
    for address in cluster.conductor_addresses:
        async with MoontideClient(address, tls=files.config()) as client:
            answers.append(await generate(client, idempotency_key="one"))
    assert len(answers[0]) == 8
    assert answers[0] == answers[1]
    assert cluster.metrics("conductor-1")['conductor_keyed_requests_total{how="followed"}'] == 1


async def test_who_has_no_certificate_of_the_authority_reaches_no_service(
    cluster: RunningCluster, files: CertificateFiles
) -> None:
    for node_id, address in (await grpc_addresses(cluster, files)).items():
        assert await health(address, Tls(files.config())) in ("SERVING", "NOT_SERVING"), node_id
        assert await health(address, Tls(files.client_config())) == "UNAVAILABLE", f"{node_id}: no certificate"
        assert await health(address, None) == "UNAVAILABLE", f"{node_id}: no TLS"
    async with MoontideClient(cluster.grpc_address, tls=files.client_config()) as client:
        with pytest.raises(NodeLost):
            await generate(client)


def test_openai_client_over_https(cluster: RunningCluster, files: CertificateFiles) -> None:
    context = ssl.create_default_context(cafile=files.directory / "ca.crt")
    with (
        httpx.Client(verify=context, timeout=TIMEOUT_S) as http,
        openai.OpenAI(base_url=f"https://{cluster.http_address}/v1", api_key="none", http_client=http) as client,
    ):
        model = client.models.list().data[0].id
        answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, stream=True)
        assert [chunk.choices[0].finish_reason for chunk in answer][-1] == "length"
    with httpx.Client(base_url=f"http://{cluster.http_address}") as plain, pytest.raises(httpx.HTTPError):
        plain.get("/v1/models")


def test_commands_reach_conductors_and_store_processes(
    cluster: RunningCluster, files: CertificateFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    options = client_options(files)
    assert cli.main(["status", "--address", cluster.grpc_address, *options]) == 0
    assert "ready" in capsys.readouterr().out
    assert cli.main(["status", "--address", cluster.grpc_address, *options[:2]]) == 1
    assert "no cluster answers with TLS" in capsys.readouterr().err
    assert cli.main(["status", "--address", cluster.grpc_address]) == 1
    assert "--ca FILE if it uses TLS" in capsys.readouterr().err
    name = ["--server-name", "moontide"]
    assert kvstore_cli.main(["stats", "--address", cluster.store_address, *options, *name]) == 0
    assert "kvstore-0" in capsys.readouterr().out


async def test_new_certificate_is_served_without_a_restart(cluster: RunningCluster, files: CertificateFiles) -> None:
    addresses = await grpc_addresses(cluster, files)
    addresses["https"] = cluster.http_address
    async with MoontideClient(cluster.grpc_address, tls=files.config()) as client:
        before = await generate(client)
        assert {name: await served_name(address, files) for name, address in addresses.items()} == dict.fromkeys(
            addresses, "first"
        )
        files.issue("moontide", "127.0.0.1", common_name="second")
        assert {name: await served_name(address, files) for name, address in addresses.items()} == dict.fromkeys(
            addresses, "second"
        )
        assert await generate(client) == before
