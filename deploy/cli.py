"""`moontide`: start a cluster on this machine and talk to clusters. Exit codes: 0 done, 1 failed, 2 wrong option or setting."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from deploy.config import ClusterConfig, load_cluster_config, settable_tree
from deploy.console import Console
from deploy.explained import render_explanation
from deploy.gantt import chrome_trace, pipeline_sentence, render_gantt, stage_table, ttft_table
from deploy.local import LocalCluster, StartFailed
from deploy.model import prepare_model
from moontide.client import ChatTurn, GenerateOptions, MoontideClient, Usage
from moontide.clock import MonotonicClock
from moontide.config import TlsConfig, api_key, describe, to_tree
from moontide.errors import BadRequest, ConfigError, MoontideError, NodeLost
from moontide.timeline import Timeline, TtftParts
from moontide.tls import add_client_arguments, client_config
from prefill_node.config import PrefillConfig

DEFAULT_ADDRESS = "127.0.0.1:8001"
DEFAULT_MODEL = "smollm2"
INTERRUPTED = 130
"""Exit code of a command that was interrupted, as in a shell."""
OPTION_SETTINGS = {
    "model": "model.name",
    "dtype": "model.dtype",
    "load_format": "model.load_format",
    "stages": "deploy.stages",
    "prefill_groups": "deploy.prefill_groups",
    "decode": "deploy.decode",
    "conductors": "deploy.conductors",
    "http_port": "deploy.http_port",
    "grpc_port": "deploy.grpc_port",
    "chunk_tokens": "prefill.chunk_tokens",
    "launcher": "deploy.launcher",
}
"""Option of `moontide up` -> the setting that it is short for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    console = Console()
    try:
        code: int = args.run(args, console)
    except ConfigError as error:
        console.error(str(error))
        return 2
    except MoontideError as error:
        console.error(str(error))
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP: the first asks for a drain, the second kills the cluster, unless it is SIGHUP.

    A closed terminal hangs up twice: its shell does, and then the system.
    """

    def __init__(self, cluster: LocalCluster, console: Console) -> None:
        self._cluster = cluster
        self._console = console
        self.stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        if self.stop.is_set():
            if number != signal.SIGHUP:
                self._cluster.kill()
            return
        self.stop.set()
        self._console.step("stopping: open requests finish first; once more to stop at once")


def run_cluster(cluster: LocalCluster, console: Console, serve: Callable[[threading.Event], int]) -> int:
    """Start `cluster`, wait until it serves, call `serve(stop)`, stop it. Nothing is left afterwards.

    Returns what `serve` did, or INTERRUPTED when a signal came before.
    Raises: StartFailed, with the logs kept, when it does not come up.
    """
    signals = StopSignals(cluster, console)
    keep_files = False
    try:
        cluster.start()
        cluster.wait_ready(signals.stop)
        code = INTERRUPTED if signals.stop.is_set() else serve(signals.stop)
    except StartFailed as error:
        keep_files = True
        cluster.kill()
        raise StartFailed(f"{error}\nthe logs are in {cluster.run_dir.path / 'logs'}") from error
    except BaseException:
        cluster.kill()
        raise
    finally:
        cluster.stop(keep_files=keep_files)
    return code


def up(args: argparse.Namespace, console: Console) -> int:
    """A cluster in the foreground."""
    config = _cluster_config(args)
    if args.print_config:
        print(yaml.safe_dump(settable_tree(to_tree(config)), sort_keys=False), end="")
        return 0
    cluster = _cluster(config, console)

    def serve(stop: threading.Event) -> int:
        print(ready_line(cluster), flush=True)
        while not stop.wait(0.5):
            for line in cluster.news():
                console.step(line)
        return 0

    run_cluster(cluster, console, serve)
    console.step("stopped")
    return 0


def ready_line(cluster: LocalCluster) -> str:
    """One line: where the cluster listens, and a command to try."""
    tls = cluster.config.tls
    scheme = "https" if tls.cert_file else "http"
    if not tls.require_client_cert:
        tls = replace(tls, cert_file="", key_file="")
    apis = ", ".join(f"{scheme}://{c.http}/v1 and gRPC {c.grpc}" for c in cluster.plan.conductors)
    options = _options_for(cluster.grpc_address, tls)
    return f'ready: {apis}; try: {program_name()} generate{options} "Why is the sky blue?"'


def program_name() -> str:
    """How this program was called, short enough to copy."""
    path = Path(sys.argv[0])
    if path.name != "moontide":
        return "moontide"
    found = shutil.which("moontide")
    if found and Path(found).resolve() == path.resolve():
        return "moontide"
    return min(str(path), os.path.relpath(path), key=len)


def generate(args: argparse.Namespace, _console: Console) -> int:
    """Stream the answer to one prompt."""
    text = _read_prompt(args)
    prompt = text if args.raw else [ChatTurn(role="user", content=text)]
    params = _params(args)

    async def run(client: MoontideClient) -> int:
        answer = await stream_answer(client, prompt, params)
        if args.timings:
            print()
            print(f"request {answer.request_id}: {usage_sentence(answer.usage)}")
            if answer.parts is not None:
                print(ttft_table(answer.parts, client_ttft_s=answer.client_ttft_s))
            print(f"more: {program_name()} timeline {answer.request_id}{_client_options(args)}")
        return 0

    return _with_client(args, run)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is known of a request once its answer has been printed."""

    request_id: str
    usage: Usage
    parts: TtftParts | None
    client_ttft_s: float
    """Call - first token, measured here on an open connection."""


async def stream_answer(client: MoontideClient, prompt: str | Sequence[ChatTurn], params: GenerateOptions) -> Answer:
    """Print the text as it comes. Raises: MoontideError."""
    await client.connect()
    clock = MonotonicClock()
    started_s = clock.now()
    request_id, parts, client_ttft_s = "", None, 0.0
    usage = Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
    async for chunk in client.generate(prompt, params=params):
        request_id = chunk.request_id or request_id
        if chunk.ttft_parts is not None:
            parts, client_ttft_s = chunk.ttft_parts, clock.now() - started_s
        usage = chunk.usage or usage
        print(chunk.text, end="", flush=True)
    print(flush=True)
    return Answer(request_id=request_id, usage=usage, parts=parts, client_ttft_s=client_ttft_s)


def status(args: argparse.Namespace, _console: Console) -> int:
    """What the cluster says about itself. Exit code 1 when it would not serve a prompt."""

    async def run(client: MoontideClient) -> int:
        cluster = await client.status()
        state = "ready" if cluster.ready else f"not ready: {cluster.not_ready_reason}"
        print(f"{cluster.model}: {state}; {cluster.active_requests} active request(s)")
        if not cluster.registry_connected:
            print("the registry is not reachable: what follows is the last known state")
        for node in sorted(cluster.nodes, key=lambda n: (n.role, n.node_id)):
            load = "  ".join(f"{key}={value:g}" for key, value in sorted(node.load.items()))
            print(f"  {node.role:<10} {node.node_id:<22} {node.address:<22} {'up' if node.alive else 'LOST':<5} {load}")
        return 0 if cluster.ready else 1

    return _with_client(args, run)


def timeline(args: argparse.Namespace, console: Console) -> int:
    """Picture of one request, or a Chrome trace of it."""

    async def run(client: MoontideClient) -> int:
        found = await client.timeline(args.request_id)
        if found is None:
            raise BadRequest(
                f"{args.address} does not know request {args.request_id!r}; `generate --timings` shows the id of a request, and "
                "a conductor remembers the latest ones"
            )
        print_timeline(found, console)
        if args.out is not None:
            try:
                args.out.write_text(json.dumps(chrome_trace(found)))
            except OSError as error:
                raise ConfigError(f"cannot write {args.out}: {error.strerror}") from error
            console.step(f"wrote {args.out}: open it in https://ui.perfetto.dev")
        return 0

    return _with_client(args, run)


def explain(args: argparse.Namespace, _console: Console) -> int:
    """Why one request went where it went."""

    async def run(client: MoontideClient) -> int:
        found = await client.explain(args.request_id)
        if found is None:
            raise BadRequest(
                f"{args.address} does not know request {args.request_id!r}; a conductor explains the latest ones that it served itself"
            )
        print(render_explanation(found))
        return 0

    return _with_client(args, run)


def role(args: argparse.Namespace, console: Console) -> int:
    """Have nodes serve in the other role."""

    async def run(client: MoontideClient) -> int:
        node_ids = await client.set_role(args.nodes, args.role)
        console.step(f"draining; then there will be: {', '.join(node_ids)}")
        return 0

    return _with_client(args, run)


def print_timeline(found: Timeline, console: Console, *, with_parts: bool = True) -> None:
    plan = f"; prefill: {found.plan}" if found.plan else ""
    print(f"request {found.request_id}: {found.outcome or 'running'} after {found.duration_s:.2f} s{plan}")
    print(render_gantt(found.spans, width=console.width()))
    sentence = pipeline_sentence(found)
    if sentence is not None:
        print(sentence)
    table = stage_table(found)
    if table is not None:
        print(table)
    if with_parts and found.ttft_parts is not None:
        print(ttft_table(found.ttft_parts))
    if found.handoff_s:
        print(f"  hand-off to decode {found.handoff_s * 1e3:.1f} ms (part of the time to the second token)")


def model_path(args: argparse.Namespace, _console: Console) -> int:
    """The prepared directory of a model, alone on standard output."""
    from model_runner.model_source import resolve_model  # seconds: it loads torch

    print(resolve_model(args.model).path)
    return 0


def demo(args: argparse.Namespace, console: Console) -> int:
    """One long document through a fresh cluster."""
    from deploy.demo import run_demo

    config = load_cluster_config(overrides=["deploy.http_port=0", "deploy.grpc_port=0", *args.set])
    return run_demo(config, console)


def _cluster(config: ClusterConfig, console: Console) -> LocalCluster:
    console.step(f"model {config.model.name}: preparing")
    model = prepare_model(config)
    cluster = LocalCluster(config, model_dir=model.path, model_id=model.model_id, say=console.step)
    console.step(
        f"starting {len(cluster.plan.processes)} processes ({config.deploy.launcher}); logs in {cluster.run_dir.path / 'logs'}"
    )
    console.step(f"Prometheus finds them by file_sd_configs: {cluster.targets_path}")
    return cluster


def _cluster_config(args: argparse.Namespace) -> ClusterConfig:
    overrides = [
        f"{setting}={json.dumps(value, ensure_ascii=False)}"  # quoted: a path may hold what means something in YAML
        for option, setting in OPTION_SETTINGS.items()
        if (value := getattr(args, option)) is not None
    ]
    return load_cluster_config(path=args.config, overrides=[*overrides, *args.set])


def _with_client(args: argparse.Namespace, run: Callable[[MoontideClient], Coroutine[Any, Any, int]]) -> int:
    address, tls = args.address, client_config(args)

    async def main() -> int:
        async with MoontideClient(address, api_key=api_key(), tls=tls) as client:
            return await run(client)

    try:
        return asyncio.run(main())
    except NodeLost as error:
        if "not reachable" not in str(error):
            raise
        if tls.ca_file:
            raise NodeLost(f"no cluster answers with TLS at {address}: {error}") from error
        raise NodeLost(
            f"no cluster answers at {address}; start one with `{program_name()} up`, or name another one with --address host:port "
            "(and --ca FILE if it uses TLS)"
        ) from error


def _read_prompt(args: argparse.Namespace) -> str:
    """Raises: ConfigError when there is none, or it is empty or no UTF-8."""
    if args.prompt is not None and args.prompt_file is not None:
        raise ConfigError("both a prompt and --prompt-file are given; leave one of them out")
    try:
        if args.prompt_file is not None:
            text = str(args.prompt_file.read_text(encoding="utf-8"))
        elif args.prompt is not None and args.prompt != "-":
            text = str(args.prompt)
        elif args.prompt is None and sys.stdin.isatty():
            raise ConfigError("no prompt; give it as an argument, with --prompt-file FILE, or on standard input")
        else:
            text = sys.stdin.read()
        text.encode()  # bytes that are no text came through as surrogates
    except OSError as error:
        raise ConfigError(f"cannot read --prompt-file {args.prompt_file}: {error.strerror}") from error
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"the prompt is no valid UTF-8 ({error.reason} at position {error.start}); convert it first"
        ) from error
    if not text:
        raise ConfigError("the prompt is empty; give some text")
    return text


def _params(args: argparse.Namespace) -> GenerateOptions:
    params = GenerateOptions(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        timeout_s=args.timeout_s,
    )
    try:
        params.to_proto()
    except ValueError as error:
        raise ConfigError(f"a sampling option does not fit into its field: {error}") from error
    return params


def usage_sentence(usage: Usage) -> str:
    return (
        f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them from the store, "
        f"{usage.completion_tokens} tokens answered"
    )


def _client_options(args: argparse.Namespace) -> str:
    return _options_for(args.address, client_config(args))


def _options_for(address: str, tls: TlsConfig) -> str:
    """What a command needs to reach a conductor."""
    values = {"--ca": tls.ca_file, "--cert": tls.cert_file, "--key": tls.key_file, "--server-name": tls.server_name}
    options = {"--address": "" if address == DEFAULT_ADDRESS else address} | (values if tls.ca_file else {})
    return "".join(f" {option} {shlex.quote(value)}" for option, value in options.items() if value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moontide",
        description="Disaggregated serving of long prompts: start a cluster on this machine, talk to it.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_up(commands)
    _add_generate(commands)

    command = commands.add_parser("status", help="nodes of a cluster and their load")
    _add_address(command)
    command.set_defaults(run=status)

    command = commands.add_parser("timeline", help="picture of one request: chunk x stage")
    command.add_argument("request_id", metavar="REQUEST_ID")
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="also write a Chrome trace for https://ui.perfetto.dev"
    )
    _add_address(command)
    command.set_defaults(run=timeline)

    command = commands.add_parser("explain", help="why a request went where it went, and what was expected of it")
    command.add_argument("request_id", metavar="REQUEST_ID")
    _add_address(command)
    command.set_defaults(run=explain)

    command = commands.add_parser(
        "role",
        help="have nodes serve in the other role",
        epilog="To prefill: decode instances in the order of the stages that they become. To decode: a prefill group, by the name that "
        "`moontide status` shows.",
    )
    command.add_argument("nodes", nargs="+", metavar="NODE")
    command.add_argument("role", choices=("prefill", "decode"))
    _add_address(command)
    command.set_defaults(run=role)

    command = commands.add_parser("model-path", help="print the prepared Hugging Face directory of a model")
    command.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL")
    command.set_defaults(run=model_path)

    command = commands.add_parser("demo", help="one long document through a fresh cluster, explained")
    command.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override one setting")
    command.set_defaults(run=demo)
    return parser


def _add_up(commands: Any) -> None:
    command = commands.add_parser(
        "up",
        help="run a cluster in the foreground",
        epilog="Every setting of every service is reached with --set; --help-config lists them.",
    )
    command.add_argument("--model", help="the built-in smollm2 (default), or a Hugging Face directory")
    command.add_argument("--dtype", help="float32 | bfloat16 | auto (default)")
    command.add_argument("--load-format", help="safetensors (default) | dummy: seeded random weights")
    command.add_argument("--stages", type=int, metavar="P", help="pipeline stages of a prefill group (default 2)")
    command.add_argument("--prefill-groups", type=int, metavar="G", help="prefill groups (default 1)")
    command.add_argument("--decode", type=int, metavar="N", help="decode instances (default 1)")
    command.add_argument("--conductors", type=int, metavar="C", help="conductors (default 1)")
    command.add_argument("--http-port", type=int, help="OpenAI API (default 8000; 0: a free one)")
    command.add_argument("--grpc-port", type=int, help="gRPC API (default 8001; 0: a free one)")
    command.add_argument(
        "--chunk-tokens", type=int, help=f"most prompt tokens in one micro-batch (default {PrefillConfig.chunk_tokens})"
    )
    command.add_argument("--launcher", help="ray (default) | process: who starts the nodes")
    command.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override one setting; repeatable")
    command.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings")
    command.add_argument("--print-config", action="store_true", help="print the resulting settings and exit")
    command.add_argument("--help-config", action=_HelpConfig, nargs=0, help="list every setting and exit")
    command.set_defaults(run=up)


def _add_generate(commands: Any) -> None:
    command = commands.add_parser("generate", help="stream the answer to a prompt")
    command.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - or nothing reads standard input")
    command.add_argument("--prompt-file", type=Path, metavar="FILE", help="read the prompt from a file")
    command.add_argument("--raw", action="store_true", help="send the text as it is, without the chat template")
    command.add_argument("--max-tokens", type=int, default=256, help="most tokens of the answer (default 256)")
    command.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the likeliest token")
    command.add_argument("--top-p", type=float)
    command.add_argument("--top-k", type=int)
    command.add_argument("--seed", type=int)
    command.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    command.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")
    command.add_argument("--timeout-s", type=float, help="give up after so many seconds")
    command.add_argument("--timings", action="store_true", help="show where the time to the first token went")
    _add_address(command)
    command.set_defaults(run=generate)


def _add_address(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help=f"gRPC address (default {DEFAULT_ADDRESS})"
    )
    add_client_arguments(command)


class _HelpConfig(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_args: object) -> None:
        print(describe(ClusterConfig))
        parser.exit(0)


if __name__ == "__main__":
    sys.exit(main())
