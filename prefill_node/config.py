"""Settings of one stage process of a prefill group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvstore.access import KvConfig, StoreAccessConfig
from model_runner.config import DEFAULT_CONTEXTS, ModelConfig
from model_runner.stage import MEASURED
from moontide.config import NodeConfig, RegistryConfig, TlsConfig, check_port
from moontide.errors import ConfigError
from moontide.roles import Home

MODES = ("cpp", "chunked-serial", "request-pp")
POLICIES = ("lars", "edf", "srpt", "fcfs")
CHUNKINGS = ("equal-time", "fixed")
PUSHES = ("auto", "layer-wise", "at-end", "after-prefill")


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """Section `prefill`: the group, this stage's place in it, and how prompts are cut. Equal on all stages but for `stage_idx`."""

    group_id: str
    """Name of the prefill group."""
    stage_idx: int
    """Place of this process in the pipeline; 0 takes requests and decides for the group."""
    num_stages: int
    """Stages of the group."""
    control_address: str
    """host:port where stage 0 listens for the other stages; they connect to it."""
    link_port: int = 0
    """Port where this stage takes hidden states from the stage before it; 0 takes a free one."""
    mode: str = "cpp"
    """cpp: the next chunk of a prompt enters as soon as the one before has left stage 0 | chunked-serial: only after it has left the
    last stage | request-pp: a prompt is one step. The latter two are there to be compared with."""
    policy: str = "lars"
    """Whose chunk is next: lars: least slack for its work | edf: earliest deadline | srpt: least work left | fcfs: first come."""
    chunking: str = "equal-time"
    """equal-time: as many chunks as the measured step times say is best, each taking equally long | fixed: chunk_tokens each,
    and nothing is measured or predicted, so that lars and srpt are first come, first served."""
    chunk_tokens: int = 2048
    """Most prompt tokens in one step, which bounds its memory; their number with chunking=fixed. Multiple of kv.block_tokens."""
    max_step_s: float = 0.5
    """Longest planned step of a stage: what a short prompt waits for behind a long one, per step in flight. For equal-time."""
    starvation_s: float = 30.0
    """A prompt that got no step, or no pages, for so long goes first once, whatever the policy; then after half as long, and so on."""
    layer_split: str = ""
    """Layers of each stage, as "16,14": borders are multiples of kv.layer_group; empty: as even as they allow; measured: by the
    speeds of the stages. Stage 0 keeps a split that is 5 % faster in the registry, and the stages start again with it."""
    num_pages: int = 0
    """Pages of this stage, one block each; 0 makes room for two prompts of the model's full context."""
    push: str = "auto"
    """When the KV of a step is put into the store. auto: layer-wise, and at-end where that costs more than it hides by measured times |
    layer-wise: each layer group behind the compute of the next | at-end: all groups at the end of the step | after-prefill: all
    steps at the end of the prompt. The last is there to be compared with."""
    max_push_bytes: int = 32 << 20
    """Most bytes of this stage on their way into the store at a time; more waits in the pages. A larger object goes alone."""
    slack: int = 1
    """Micro-batches in flight beyond one per stage: they hide the way of a report back to stage 0."""
    max_queue: int = 256
    """Requests that wait for pages or room in the store; one more is refused, unless its tenant has less than an even part of them."""
    heartbeat_s: float = 1.0
    """Seconds between two signs of life on a control connection."""
    peer_timeout_s: float = 5.0
    """A stage that was silent for so long counts as lost."""
    lease_s: float = 10.0
    """Lease of a reservation in the store, until the conductor takes over its renewal."""
    seal_timeout_s: float = 30.0
    """Longest wait for the objects of a block to be seen in the store."""

    def __post_init__(self) -> None:
        if not self.group_id:
            raise ConfigError("prefill.group_id is empty; give every prefill group its own name")
        if self.num_stages < 1:
            raise ConfigError(f"prefill.num_stages={self.num_stages} must be at least 1")
        if not 0 <= self.stage_idx < self.num_stages:
            raise ConfigError(
                f"prefill.stage_idx={self.stage_idx} must lie in [0, num_stages={self.num_stages}); count from 0"
            )
        for name, choices in (("mode", MODES), ("policy", POLICIES), ("chunking", CHUNKINGS), ("push", PUSHES)):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"prefill.{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(choices)}"
                )
        for name in ("chunk_tokens", "max_queue", "max_push_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"prefill.{name}={getattr(self, name)} must be at least 1")
        for name in ("num_pages", "slack"):
            if getattr(self, name) < 0:
                raise ConfigError(f"prefill.{name}={getattr(self, name)} must be 0 or more")
        for name in ("heartbeat_s", "lease_s", "seal_timeout_s", "max_step_s", "starvation_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"prefill.{name}={getattr(self, name)} must be above 0 seconds")
        if self.peer_timeout_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"prefill.peer_timeout_s={self.peer_timeout_s} must be at least twice prefill.heartbeat_s={self.heartbeat_s}"
            )
        check_port("prefill.link_port", self.link_port)
        split_address("prefill.control_address", self.control_address)

    @property
    def max_in_flight_steps(self) -> int:
        """Micro-batches that stage 0 has started and not every stage has finished: the one bound on the pipeline's depth."""
        return self.num_stages + self.slack

    def resolve_num_pages(self, *, max_context: int, block_tokens: int) -> int:
        return self.num_pages or DEFAULT_CONTEXTS["prefill"] * -(-max_context // block_tokens)


@dataclass(frozen=True, kw_only=True)
class PrefillNodeConfig:
    """Everything that one stage process needs."""

    node: NodeConfig
    registry: RegistryConfig
    tls: TlsConfig = field(default_factory=TlsConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    kv: KvConfig = field(default_factory=KvConfig)
    store: StoreAccessConfig
    prefill: PrefillConfig
    decode: dict[str, Any] | None = None
    """Section `decode` that it gets when it becomes a decode instance; empty: it does not."""
    home: Home | None = None
    """What it was deployed as, if that is something else. Written by itself."""

    def __post_init__(self) -> None:
        chunk_tokens, block_tokens = self.prefill.chunk_tokens, self.kv.block_tokens
        if chunk_tokens % block_tokens:
            near = chunk_tokens // block_tokens * block_tokens or block_tokens
            raise ConfigError(
                f"prefill.chunk_tokens={chunk_tokens} is no multiple of kv.block_tokens={block_tokens}; try {near}"
            )
        is_paced = self.model.load_format == "paced"
        if self.prefill.layer_split == MEASURED and self.prefill.chunking == "fixed" and not is_paced:
            raise ConfigError(
                f"prefill.layer_split={MEASURED} needs step times, and prefill.chunking=fixed measures none; use equal-time"
            )


def split_address(name: str, address: str) -> tuple[str, int]:
    """Host and port of "host:port". Raises: ConfigError naming the setting `name`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= 65535:
        raise ConfigError(f"{name}={address!r} is no address; write host:port")
    return host, int(port)
